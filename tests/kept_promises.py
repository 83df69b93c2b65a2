"""What was promised of the checkpoints of one run, and everything on disk that breaks it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ckptd.disk.decisions import read_decisions
from ckptd.disk.series import latest_valid
from ckptd.disk.verification import check
from ckptd.errors import CkptdError, OutcomeUnknown
from ckptd.format.records import read_index
from ckptd.names import parse_step_folder, parse_work_folder

RUN: Final = "default"
KEEP: Final = 2  #: what retention keeps


@dataclass
class Promised:
    """What the outside was told.

    Attributes:
        acked: Sequence → name, and the files it had then.
        verified: Sequences that were proved.
        failed: (client, snapshot) that were said not to be saved.
        unknown: Sequences of which nothing is known.
        condemned: Sequences that were damaged on the medium.
        abandoned: Sequences that are on no line any more.
        bases: From which a line goes on of whose first checkpoint nothing is known.
        gone: Sequences that retention has removed, as it may.
    """

    acked: dict[int, tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    verified: set[int] = field(default_factory=set)
    failed: set[tuple[str, int]] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    condemned: set[int] = field(default_factory=set)
    abandoned: set[int] = field(default_factory=set)
    bases: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def saved(self, sequence: int, folder: Path, base: int | None = None) -> None:
        """It was acknowledged; what came after `base` is abandoned by that."""
        self.bases.clear()
        if base is not None:
            self._let_go(folder.parent)
            self.abandoned |= {known for known in (*self.acked, *self.unknown) if known > base}
        files: dict[str, bytes] = {}
        with contextlib.suppress(OSError):  # the disk may be cut off by now: that it is whole is seen later
            files = files_in(folder)
        self.acked[sequence] = (folder.name, files)

    def not_saved(
        self, key: tuple[str, int], sequence: int, error: CkptdError, base: int | None = None
    ) -> None:
        if isinstance(error, OutcomeUnknown):
            self.unknown.add(sequence)
            self.bases |= set() if base is None else {base}
        else:
            self.failed.add(key)

    def condemn(self, name: str) -> None:
        self.condemned |= {sequence for sequence, (acked, _) in self.acked.items() if acked == name}

    @property
    def newest(self) -> int | None:
        good = self.acked.keys() - self.condemned - self.abandoned
        return max(good, default=None)

    def broken(self, root: Path) -> Iterator[str]:
        """Everything on disk that breaks a promise."""
        if (root / RUN).is_dir():
            yield from self._broken_acks(root / RUN)
            yield from self._broken_folders(root / RUN)
            yield from self._broken_latest(root)
        elif self.acked:
            yield "the run is gone"

    def _broken_acks(self, run_dir: Path) -> Iterator[str]:
        self._let_go(run_dir)
        for sequence, (name, files) in self.acked.items():
            if sequence in self.condemned | self.gone:
                continue
            if not (run_dir / name).is_dir() or (files and files_in(run_dir / name) != files):
                yield f"{name} (sequence {sequence}) was acknowledged, and isn't there as it was"

    def _let_go(self, run_dir: Path) -> None:
        for sequence, (name, _) in self.acked.items():
            newer = [proved for proved in self.verified - self.abandoned if proved > sequence]
            may_go = len(newer) >= KEEP or sequence in self.abandoned
            if may_go and not (run_dir / name).exists():
                self.gone.add(sequence)

    def _broken_folders(self, run_dir: Path) -> Iterator[str]:
        for path in sorted(run_dir.iterdir()):
            if parse_step_folder(path.name) is None:
                continue
            index = read_index(path)
            if index.sequence not in self.condemned and not check(path).ok:
                yield f"{path.name} is there and not whole"
            if (index.client_id, index.snapshot) in self.failed:
                yield f"{path.name} is there, and was said not to be saved"

    def _broken_latest(self, root: Path) -> Iterator[str]:
        newest = self.newest
        found = latest_valid(root, RUN)
        seen = found.sequence if found is not None else None
        right = {newest, *self.bases} | {unknown for unknown in self.unknown if unknown > (newest or 0)}
        if seen not in right:
            yield f"latest is {seen}, not {sorted(right, key=str)}"


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def left_over(root: Path) -> Iterator[str]:
    """What is there and shouldn't be, once nothing fails any more and a save went well since."""
    for path in root.rglob("*"):
        if parse_work_folder(path.name) is not None:
            yield f"left over: {path.relative_to(root)}"
    if len(found := list((root / RUN / "decisions").glob("*-birth-*"))) != 1:
        yield f"the run has {len(found)} births"
    decisions = read_decisions(root / RUN)
    if decisions.unreadable or decisions.birth_run_id is None:
        yield f"its decisions can't be read: {decisions.unreadable}"
    ids = {read_index(path).run_id for path in (root / RUN).glob("step-*")}
    if len(ids) > 1:
        yield f"checkpoints of {len(ids)} runs in one"


def says_too_little(error: BaseException) -> Iterator[str]:
    """An error for people says what is wrong, where or what was seen, and what to do."""
    if isinstance(error, CkptdError) and not (
        error.what and (error.where or error.seen or error.wanted) and error.todo
    ):
        yield f"{type(error).__name__} says too little: {error}"
