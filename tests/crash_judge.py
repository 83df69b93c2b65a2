"""Whether what a crash left keeps the promises that were made before it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptd.names import DECISIONS_DIR, INDEX_FILE, TABLE_FILE
from crash_daemon import Acked, Daemon, Sealed
from crash_recorder import Recorder
from crash_seen import RUN_PATH, Eye, Seen, folders, indexes
from crash_states import State
from crash_trace import Mark, Tree


@dataclass
class Told:
    """What was promised before the crash.

    Attributes:
        acked: By sequence.
        begun: Sequences under way.
        may_go, gone: Sequences that retention may remove; that it has said it removed.
        condemned: Sequences that are about to be damaged.
        sealed: Snapshots in shared memory.
        files: Path → what it was said to hold; and what it may hold as well since.
    """

    acked: dict[int, Acked] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    may_go: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    condemned: set[int] = field(default_factory=set)
    sealed: list[Sealed] = field(default_factory=list)
    files: dict[str, list[bytes | None]] = field(default_factory=dict)

    @classmethod
    def by(cls, marks: tuple[Mark, ...]) -> Told:
        told = cls()
        for mark in marks:
            told._hear(mark)
        return told

    def _hear(self, mark: Mark) -> None:
        match mark.what:
            case "acked":
                self.acked[mark.about.sequence] = mark.about
            case "begun":
                self.begun.add(mark.about)
            case "may go":
                self.may_go |= mark.about
            case "gone":
                self.gone |= mark.about
            case "condemned":
                self.condemned.add(mark.about)
            case "sealed":
                self.sealed.append(mark.about)
            case "file begun":
                path, content = mark.about
                self.files.setdefault(path, [None]).append(content)
            case "file":
                path, content = mark.about
                self.files[path] = [content]

    @property
    def head(self) -> Acked | None:
        """The newest that was acknowledged and is good."""
        good = [acked for sequence, acked in self.acked.items() if sequence not in self.condemned]
        return max(good, key=lambda acked: acked.sequence, default=None)

    @property
    def right(self) -> set[int | None]:
        """What `latest` may answer: the newest acknowledged one, or one that was under way after it.

        One that is about to be damaged may still be whole.
        """
        newest = self.head.sequence if self.head is not None else None
        return {newest} | {sequence for sequence in self.begun if sequence > (newest or 0)}

    def ancestors(self, of: Acked) -> set[int]:
        found = set()
        parent = of.parent
        while parent is not None:
            found.add(parent)
            parent = self.acked[parent].parent
        return found


def faults(state: State, eye: Eye) -> list[str]:
    """What is wrong with a state; nothing if every promise is kept."""
    seen, told = eye.look(state), Told.by(state.told)
    if isinstance(seen, str):
        return [seen]
    return [*_from_disk(told, state, seen), *_after_recovery(told, state, seen)]


def recover(recorder: Recorder, folder: object) -> None:
    """A start of the daemon, as a story."""
    with Daemon(recorder, folder):  # type: ignore[arg-type]
        pass


def _from_disk(told: Told, state: State, seen: Seen) -> Iterator[str]:
    if seen.latest not in told.right:
        yield f"from disk, latest is {seen.latest}, not {sorted(told.right, key=str)}"
    yield from _checkpoints(told, state.tree)
    yield from _files(told, state.tree)
    head = told.head
    if head is not None and seen.run_id != head.run_id:
        yield f"the run would be {seen.run_id} were each index damaged, and was {head.run_id}"
    if head is not None and head.sequence == seen.latest and seen.fall_back is not None:
        line = told.ancestors(head)
        if seen.fall_back not in (line if line - told.may_go - told.condemned else line | {0}):
            yield f"the fork was forgotten: its head is damaged, and latest is {seen.fall_back}"


def _checkpoints(told: Told, tree: Tree) -> Iterator[str]:
    there = folders(tree)
    for sequence, acked in told.acked.items():
        if sequence in told.condemned or (sequence in told.may_go and acked.name not in there):
            continue
        if sequence in told.gone:
            yield f"{acked.name} (sequence {sequence}) is back, which was said to be removed"
        elif tuple(sorted(there.get(acked.name, {}).items())) != acked.files:
            yield f"acknowledged {acked.name} (sequence {sequence}) isn't there as it was"
    condemned = {told.acked[sequence].name for sequence in told.condemned if sequence in told.acked}
    for name, files in there.items():
        if name not in condemned and (fault := _fault(tuple(sorted(files.items())))):
            yield f"{name} has a checkpoint's name and isn't whole: {fault}"


@functools.cache
def _fault(files: tuple[tuple[str, bytes], ...]) -> str:
    """What the index says, against the files: with nothing of the code that is judged."""
    held = dict(files)
    try:
        index = json.loads(held.pop(INDEX_FILE))
        wanted = {shard["path"]: shard["sha256"] for shard in index["shards"]}
        wanted[TABLE_FILE] = index["tensors_sha256"]
        if index["meta_sha256"]:
            wanted["meta.pt"] = index["meta_sha256"]
    except (KeyError, ValueError) as error:
        return f"{type(error).__name__} in its index"
    seen = {name: hashlib.sha256(content).hexdigest() for name, content in held.items()}
    return (
        "" if seen == wanted else f"files {sorted(name for name in wanted if seen.get(name) != wanted[name])}"
    )


def _files(told: Told, tree: Tree) -> Iterator[str]:
    for path, right in told.files.items():
        if tree.get(path) not in right:
            yield f"{path} holds neither what it was said to hold nor what was being written: {tree.get(path)!r}"


def _after_recovery(told: Told, state: State, seen: Seen) -> Iterator[str]:
    after = seen.after
    yield from (f"after recovery: {fault}" for fault in after.wrong)
    if after.latest not in told.right or (after.latest != seen.latest and not state.memory):
        yield f"after recovery, latest is {after.latest}, and was {seen.latest}"
    yield from _checkpoints(told, after.tree)
    yield from _files(told, after.tree)
    if after.next <= max(told.acked, default=0):
        yield f"the next sequence is {after.next}, which was given before"
    if lost := [path for path in _decisions(state.tree) if after.tree.get(path) != state.tree[path]]:
        yield f"a decision is gone: {lost}"
    yield from _sealed(told, state, after.tree)


def _decisions(tree: Tree) -> list[str]:
    return [path for path in tree if path.startswith(f"{RUN_PATH}/{DECISIONS_DIR}/") and "/.tmp-" not in path]


def _sealed(told: Told, state: State, tree: Tree) -> Iterator[str]:
    """What was sealed when only processes died is written; nothing is written twice, or again once removed."""
    written = [Sealed(str(i["client_id"]), int(str(i["snapshot"]))) for i in indexes(tree).values()]
    removed = [told.acked[sequence].snapshot for sequence in told.gone]
    going = [told.acked[sequence].snapshot for sequence in told.may_go & told.acked.keys()]
    for sealed in told.sealed:
        times = written.count(sealed)
        if sealed in removed:
            if times:
                yield f"{sealed} is written again, after it was removed"
        elif times > 1 or (times == 0 and state.memory and sealed not in going):
            yield f"{sealed} is written {times} times"
