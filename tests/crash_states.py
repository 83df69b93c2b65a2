"""The states that a crash may leave of a recorded trace.

At any point of the trace everything that was done may be on the disk (a process was killed), or any part of what
wasn't synced may be missing (a power cut). Under strict POSIX nothing is promised but that
- a file's bytes are there if the file was synced after they were written, and
- a folder's names are as they were when that folder was synced.
What came after may be there in any combination: a later name without an earlier one, a name without its
file's bytes, bytes as zeros, or half of them (with `torn`: and the other half as zeros). Names that change together in
one folder (a rename) change together; after a rename into another folder a crash may leave both names, but not
neither, as in every file system that renames atomically.
An ext4-like journal keeps the order of all changes of names; its states are those in which a prefix of them is
there, so they are among these, and are always tried, however many others there are.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from crash_trace import ROOT, Mark, Memory, Names, Sync, Trace, Tree, Truncate, Write, apply, tree_of

Bytes = Literal["durable", "all", "half", "zeros", "torn"]
_FATES: Final[tuple[Bytes, ...]] = ("durable", "all", "half", "zeros")
_WITH_TORN: Final[tuple[Bytes, ...]] = (*_FATES, "torn")


@dataclass(frozen=True)
class State:
    """What is on the disk after a crash.

    Attributes:
        cut: How many operations of the trace had been done.
        kind: "kill", "ordered" or "strict".
        tree: What is below the folder that was watched.
        told: The marks set before the crash.
        memory: What is in shared memory: nothing after a power cut.
    """

    cut: int
    kind: str
    tree: Tree
    told: tuple[Mark, ...]
    memory: Tree = field(default_factory=dict)

    @functools.cached_property
    def on_disk(self) -> str:
        """One for each tree and memory."""
        return f"{digest_of(self.tree)} {digest_of(self.memory)}"

    @property
    def digest(self) -> str:
        """One for each tree, memory and number of things told."""
        return f"{len(self.told)} {self.on_disk}"


def digest_of(tree: Tree) -> str:
    hashed = hashlib.sha256()
    for path in sorted(tree):
        content = tree[path]
        hashed.update(repr((path, None if content is None else len(content))).encode())
        hashed.update(content or b"")
    return hashed.hexdigest()


@dataclass
class _File:
    """A file: its durable bytes, and what was done to it since."""

    durable: bytearray = field(default_factory=bytearray)
    since: list[Write | Truncate] = field(default_factory=list)

    def sync(self) -> None:
        for op in self.since:
            apply(self.durable, op)
        self.since.clear()

    def bytes_as(self, fate: Bytes) -> bytes:
        content = bytearray(self.durable)
        if fate == "durable":
            return bytes(content)
        for op in self.since:
            apply(content, op)
        grown = max(0, len(content) - len(self.durable))
        if fate == "half" and grown:
            del content[-(grown - grown // 2) :]
        elif fate == "zeros" and grown:
            content[-grown:] = bytes(grown)
        elif fate == "torn" and grown:
            content[-(grown // 2) :] = bytes(grown // 2)
        return bytes(content)


class Disk:
    """A disk, as far as the trace was followed.

    Args:
        trace: What is done.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._memory: Tree = {}
        self._files: dict[int, _File] = {}
        self._names: list[Names] = []  # all changes, in order
        self._durable: set[int] = set()  # which of them are
        self._moves = set[int]()  # those that take an old name away
        self._told: list[Mark] = []
        self._start: dict[int, dict[str, int]] = {folder: {} for folder in trace.folders}
        self._put_before(trace)

    def _put_before(self, trace: Trace) -> None:
        # The recorder numbered what was there in this order.
        numbers = {"": ROOT}
        for number, (path, content) in enumerate(trace.before.items(), 1):
            numbers[path] = number
            above, _, name = path.rpartition("/")
            self._start[numbers[above]][name] = number
            if content is not None:
                self._files[number] = _File(bytearray(content))

    def step(self, at: int) -> None:
        op = self._trace.ops[at]
        if isinstance(op, Names):
            if op.moved:
                self._moves.add(len(self._names))
            self._names.append(op)
        elif isinstance(op, Mark):
            self._told.append(op)
        elif isinstance(op, Memory):
            self._memory = op.tree
        elif isinstance(op, Sync):
            self._sync(op.inode)
        else:
            self._files.setdefault(op.file, _File()).since.append(op)

    def _sync(self, inode: int) -> None:
        if inode in self._trace.folders:
            self._durable |= {at for at, names in enumerate(self._names) if names.folder == inode}
        elif inode in self._files:
            self._files[inode].sync()

    def waits_for(self, inode: int) -> bool:
        """Whether a sync of it would do anything."""
        if inode in self._files and self._files[inode].since:
            return True
        return any(at not in self._durable and n.folder == inode for at, n in enumerate(self._names))

    def pending(self) -> tuple[list[int], list[int]]:
        """Changes of names and files that a power cut may take."""
        names = [at for at in range(len(self._names)) if at not in self._durable]
        return names, [inode for inode, file in self._files.items() if file.since]

    def state(self, cut: int, kind: str, kept: frozenset[int], fates: dict[int, Bytes]) -> State:
        folders = {folder: dict(names) for folder, names in self._start.items()}
        there = self._durable | kept
        for at, change in enumerate(self._names):
            if at in there or at + 1 in self._moves & self._durable:
                if at in self._moves and at not in self._durable and at - 1 not in there:
                    continue
                for name, inode in change.changes:
                    if inode is None:
                        folders[change.folder].pop(name, None)
                    else:
                        folders[change.folder][name] = inode
        content = {inode: file.bytes_as(fates.get(inode, "durable")) for inode, file in self._files.items()}
        memory = self._memory if kind == "kill" else {}
        return State(cut, kind, tree_of(folders, _Missing(content)), tuple(self._told), memory)


class _Missing(dict[int, bytes]):
    def __missing__(self, key: int) -> bytes:
        return b""


def states(
    trace: Trace, *, most: int, seed: int = 0, first_cut: int = 0, torn: bool = False, kind: str = ""
) -> Iterator[State]:
    """Different states, every cut of the trace, kill and power cut.

    Args:
        trace: What was done.
        most: Power-cut states of one cut, beside those that an ordered journal leaves; where there are more, a sample.
        seed: Of the sample.
        first_cut: Only of this cut and later ones.
        torn: A file that wasn't synced may also have its whole length, and zeros in the second half.
        kind: Only this kind; "" for all.
    """
    disk, seen, dice = Disk(trace), set[str](), random.Random(seed)
    for cut in range(len(trace.ops) + 1):
        if cut:
            disk.step(cut - 1)
        if cut < max(trace.begins, first_cut):
            continue
        for state in _of_cut(disk, cut, most, dice, _WITH_TORN if torn else _FATES):
            if kind in ("", state.kind) and (digest := state.digest) not in seen:
                seen.add(digest)
                yield state


def idle(trace: Trace) -> set[int]:
    """The positions of syncs that had nothing to do: all was durable already."""
    disk, found = Disk(trace), set[int]()
    for at, op in enumerate(trace.ops):
        if isinstance(op, Sync) and not disk.waits_for(op.inode):
            found.add(at)
        disk.step(at)
    return found


def _of_cut(
    disk: Disk, cut: int, most: int, dice: random.Random, every: tuple[Bytes, ...]
) -> Iterator[State]:
    names, files = disk.pending()
    yield disk.state(cut, "kill", frozenset(names), dict.fromkeys(files, "all"))
    for upto in range(len(names) + 1):
        for fate in ("durable", "all"):
            yield disk.state(cut, "ordered", frozenset(names[:upto]), dict.fromkeys(files, fate))
    if 2 ** len(names) * len(every) ** len(files) <= most:
        for picked in itertools.product((False, True), repeat=len(names)):
            kept = frozenset(itertools.compress(names, picked))
            for fates in itertools.product(every, repeat=len(files)):
                yield disk.state(cut, "strict", kept, dict(zip(files, fates, strict=True)))
        return
    for at in names:  # one alone; all but one
        for kept in (frozenset({at}), frozenset(names) - {at}):
            yield disk.state(cut, "strict", kept, dict.fromkeys(files, "all"))
    for file in files:  # one file's bytes alone are gone
        for fate in every[:1] + every[2:]:
            yield disk.state(cut, "strict", frozenset(names), {**dict.fromkeys(files, "all"), file: fate})  # type: ignore[dict-item]
    for _ in range(most):
        kept = frozenset(at for at in names if dice.random() < 0.5)
        yield disk.state(cut, "strict", kept, {file: dice.choice(every) for file in files})
