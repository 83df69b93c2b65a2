"""Whether what a crash left keeps the promises: asked from disk alone, then of a real recovery, then of a next save."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptd.disk.series import latest_valid, read_series
from ckptd.errors import CkptdError
from ckptd.names import DECISIONS_DIR, INDEX_FILE
from crash_states import State
from crash_stories import RUN, Acked, Daemon, files_in, root_in
from crash_trace import Mark, Recorder


@dataclass
class Told:
    """What was promised before the crash."""

    acked: dict[int, Acked] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    may_go: set[int] = field(default_factory=set)
    condemned: set[int] = field(default_factory=set)

    @classmethod
    def by(cls, marks: tuple[Mark, ...]) -> Told:
        told = cls()
        for mark in marks:
            if mark.what == "acked":
                told.acked[mark.about.sequence] = mark.about
            elif mark.what == "begun":
                told.begun.add(mark.about)
            elif mark.what == "may go":
                told.may_go |= mark.about
            elif mark.what == "condemned":
                told.condemned.add(mark.about)
        return told

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


@contextmanager
def without_waiting() -> Iterator[None]:
    """What is judged is there already: its syncs may be skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _fd: None)
        yield


def lay_out(state: State, folder: Path) -> None:
    """Make folder hold the state, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in sorted(state.tree):
        content = state.tree[path]
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def faults(state: State, folder: Path) -> list[str]:
    """What is wrong with a state; nothing if every promise is kept. Uses folder as it likes."""
    lay_out(state, folder)
    told = Told.by(state.told)
    found: list[str] = []
    try:
        with without_waiting():
            found.extend(_from_disk(told, folder))
            found.extend(_after_recovery(told, folder))
    except (CkptdError, OSError, AssertionError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def recover(_recorder: Recorder, folder: Path) -> None:
    """A start of the daemon, as a story."""
    with Daemon(Recorder(folder), folder):
        pass


def _from_disk(told: Told, folder: Path) -> Iterator[str]:
    root = root_in(folder)
    yield from _answer(told, root, "from disk")
    yield from _acknowledged(told, root / RUN)
    head = told.head
    if head is not None and head.sequence - 1 != (head.parent or 0) and told.right == {head.sequence}:
        yield from _fall_back(told, head, root)


def _answer(told: Told, root: Path, when: str) -> Iterator[str]:
    latest = latest_valid(root, RUN) if root.exists() else None
    seen = latest.sequence if latest is not None else None
    if seen not in told.right:
        yield f"{when}, latest is {seen}, not {sorted(told.right, key=str)}"


def _acknowledged(told: Told, run_dir: Path) -> Iterator[str]:
    for sequence, acked in told.acked.items():
        folder = run_dir / acked.name
        if sequence in told.condemned or (sequence in told.may_go and not folder.exists()):
            continue
        if not folder.is_dir() or files_in(folder) != acked.files:
            yield f"acknowledged {acked.name} (sequence {sequence}) isn't there as it was"


def _fall_back(told: Told, head: Acked, root: Path) -> Iterator[str]:
    """The head of a forked line is damaged: what takes its place is on its own line."""
    with damaged(root / RUN / head.name / INDEX_FILE):
        latest = latest_valid(root, RUN)
    if latest is None or latest.sequence not in told.ancestors(head):
        yield f"the fork was forgotten: its head is damaged, and latest is {latest}"


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    content = file.read_bytes()
    file.write_bytes(b"")
    yield
    file.write_bytes(content)


def _identity(told: Told, folder: Path) -> Iterator[str]:
    """Whose the run is, is known even when its one checkpoint is damaged."""
    if told.head is None or len(told.acked) > 1:
        return
    index = root_in(folder) / RUN / told.head.name / INDEX_FILE
    if not index.exists():
        return  # said already
    with damaged(index), Daemon(Recorder(folder), folder) as daemon:
        seen = daemon.catalogue.run_id
    if seen != told.head.run_id:
        yield f"the run is {seen} after its one checkpoint was damaged, and was {told.head.run_id}"


def _after_recovery(told: Told, folder: Path) -> Iterator[str]:
    root = root_in(folder)
    yield from _identity(told, folder)
    with Daemon(Recorder(folder), folder) as daemon:
        if left := [str(p) for p in root.rglob("*") if p.name.startswith((".tmp-", ".trash-"))]:
            yield f"left after recovery: {left}"
        yield from _answer(told, root, "after recovery")
        yield from _acknowledged(told, daemon.run_dir)
        if daemon.catalogue.highest_sequence < max(told.acked, default=0):
            yield f"the next sequence would be {daemon.catalogue.highest_sequence + 1}, which was given before"
        if len(list((daemon.run_dir / DECISIONS_DIR).glob("*-birth-*"))) != 1:
            yield "not one birth"
        saved = daemon.save(777, verify=True)
        latest = latest_valid(root, RUN)
        if latest is None or latest.sequence != saved.index.sequence:
            yield f"the next save is {saved.index.sequence}, and latest is {latest}"
        ids = {
            entry.index.run_id for entry in read_series(daemon.root, RUN).entries if entry.index is not None
        }
        if len(ids) != 1:
            yield f"checkpoints of {len(ids)} runs in one"
