"""What is on disk of a run: every checkpoint folder with its state, its place in the order and on the line.

Reading works without a daemon and beside one: folders come, go and are renamed meanwhile. A listing taken
during a rename can show neither the old name nor the new one, so a run is listed until two listings agree.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ckptd.disk.copies import hinted, without_copies
from ckptd.disk.decisions import Decisions, read_decisions
from ckptd.disk.entry import MACHINE_ERRORS, Entry, folder_identity, read_entry, read_failed
from ckptd.disk.lineage import Line, Position, head_of, line_of, next_position
from ckptd.disk.rootdir import Root
from ckptd.disk.run_index import RunIndex, read_run_index
from ckptd.disk.verification import stat_signature
from ckptd.errors import SaveFailed
from ckptd.format.records import CheckpointIndex
from ckptd.names import (
    QUARANTINE_DIR,
    parse_quarantine_folder,
    parse_step_folder,
    parse_work_folder,
)
from ckptd.snapshot.descriptor import Descriptor

__all__ = [
    "Entry", "Listing", "Series", "candidates", "list_run", "list_steps", "position_after", "quarantined_entry",
    "read_series",
]  # fmt: skip

_MAX_LISTINGS: Final = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A run as it was on disk at one moment.

    Attributes:
        run: Its name.
        run_id: Its id: from its birth, else that of the highest sequence; "" when there is neither.
        run_dir: Its folder; may not exist.
        entries: By sequence; those without one where their step would be.
        decisions: All of them.
        line: The line that ends at the head.
        quarantined: Sequence and folder name of each checkpoint of the line that was found corrupt and moved.
        known_sequences: Seen in folders, temp, trash, quarantine, decisions.
        next_sequence: One more than those and what the run's index knows. Slots may know higher ones.
    """

    run: str
    run_id: str
    run_dir: Path
    entries: tuple[Entry, ...]
    decisions: Decisions
    line: Line
    quarantined: tuple[tuple[int, str], ...]
    known_sequences: frozenset[int]
    next_sequence: int

    @property
    def own(self) -> list[CheckpointIndex]:
        """Indexes of the run's own checkpoints."""
        return [entry.index for entry in self.entries if entry.own and entry.index is not None]

    @property
    def head(self) -> CheckpointIndex | None:
        """What a client that restores nothing goes on from: the newest of its own on the line."""
        return head_of(self.own, self.line)


@dataclass(frozen=True, slots=True)
class Listing:
    """The names in a run's folder that mean something; every other name is nobody's of ours."""

    steps: frozenset[str] = frozenset()
    temp: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()  #: sequences in trash and quarantine
    quarantined: frozenset[tuple[int, str]] = frozenset()


def read_series(root: Root, run: str, *, seen: Iterable[Entry] = ()) -> Series:
    """Read a run from disk. A run without a folder is empty.

    Args:
        root: The root.
        run: The run.
        seen: What was read of it before: whole checkpoints whose folder is still that one aren't opened again, for
            they never change. Whoever wants to know of damage gives none.

    Raises:
        InvalidArgument: Not a run name.
        OSError: The folder is there and can't be read.
        ReadFailed: There are no descriptors or no memory left to read what is in it.
    """
    run_dir = root.run_dir(run)
    # A fork is recorded before its checkpoint: decisions read after the listing know those of all listed.
    listing, read = _read_steadily(run_dir, seen)
    decisions = read_decisions(run_dir)
    _refuse_if_machine_fails(run_dir, read, decisions)
    cache = read_run_index(run_dir) or RunIndex(run=run)
    read = hinted(without_copies(read, cache), cache)
    run_id = decisions.birth_run_id or _id_of_highest(read)
    read = [replace(entry, own=entry.index is not None and entry.index.run_id == run_id) for entry in read]
    own = [entry.index for entry in read if entry.own and entry.index is not None]
    unreadable = {entry.name for entry in read if entry.index is None}
    line = line_of(own, decisions.forks, listing.moved, unreadable)
    known = frozenset(
        {entry.index.sequence for entry in read if entry.index is not None}
        | {entry.hint for entry in read if entry.hint is not None and entry.is_in_doubt}
        | listing.temp | listing.moved | {fork.sequence for fork in decisions.forks}
        | {summary.sequence for summary in cache.checkpoints}  # also of one that was deleted by hand and restored before
    )  # fmt: skip
    highest = max([0, decisions.highest_sequence, cache.highest_sequence, *known])
    return Series(
        run=run, run_id=run_id, run_dir=run_dir,
        entries=tuple(_placed(read, line, cache)), decisions=decisions,
        line=line, quarantined=tuple(sorted(held for held in listing.quarantined if held[0] in line)),
        known_sequences=known, next_sequence=highest + 1,
    )  # fmt: skip


def list_run(run_dir: Path) -> Listing:
    """One look at a run's folder; no folder is an empty one."""
    steps, temp, moved = set[str](), set[int](), set[int]()
    for name, is_folder in _names(run_dir):
        if is_folder and parse_step_folder(name) is not None:
            steps.add(name)
        elif work := parse_work_folder(name):
            (temp if work[0] == "tmp" else moved).add(work[1])
    quarantined = list_quarantine(run_dir)
    moved |= {sequence for sequence, _ in quarantined}
    return Listing(frozenset(steps), frozenset(temp), frozenset(moved), quarantined)


def list_steps(run_dir: Path, known: Collection[str] = ()) -> set[str]:
    """The names of the checkpoint folders alone; those known are known to be such names."""
    return {
        name for name, is_folder in _names(run_dir)
        if is_folder and (name in known or parse_step_folder(name) is not None)
    }  # fmt: skip


def list_quarantine(run_dir: Path) -> frozenset[tuple[int, str]]:
    """Sequence and folder name of each checkpoint in quarantine."""
    named = ((parse_quarantine_folder(name), name) for name, _ in _names(run_dir / QUARANTINE_DIR))
    return frozenset((held[1], name) for held, name in named if held is not None)


def position_after(series: Series, descriptor: Descriptor, sequence: int, *, run_id: str) -> Position:
    """Where a client's next snapshot goes, as `sequence`.

    Raises:
        SaveFailed: What it goes on from may be among the checkpoints that can't be read now. To guess would
            abandon a good past for ever.
    """
    position = next_position(
        series.own, series.decisions.forks, series.line, series.known_sequences,
        run_id=run_id, sequence=sequence, client_id=descriptor.client_id,
        base_sequence=descriptor.base_sequence, base_snapshot=descriptor.base_snapshot,
        base_before=descriptor.base_before, begins_line=descriptor.begins_line,
    )  # fmt: skip
    restored = descriptor.base_sequence is not None or descriptor.begins_line
    first = restored and descriptor.snapshot == descriptor.base_snapshot + 1
    for entry in series.entries:
        if entry.is_in_doubt and _may_be_parent(entry, position, first):
            raise SaveFailed(
                "what this snapshot goes on from can't be told", where=str(entry.path), seen=entry.reason,
                todo="it is saved again once the disk can be read; else move that folder away",
            )  # fmt: skip
    return position


def _may_be_parent(entry: Entry, position: Position, first: bool) -> bool:
    """Whether one that can't be read may be what the snapshot goes on from, in place of the position's parent.

    `first`: the snapshot is the client's first after a restore, so that only what it restored can be, or
    nothing of the run when that came from elsewhere. One whose sequence nothing tells is in the way even so:
    the sequence to give may be its own.
    """
    if entry.index is not None:
        return False  # known from before: it was among those the parent was chosen from
    if entry.hint is None:
        return True
    return not first and (position.parent is None or entry.hint > position.parent)


def candidates(series: Series) -> list[Entry]:
    """What the latest may be, newest first: the run's own on the line, else, when it has none, foreign ones.

    Incomplete and corrupt ones are among them, also those in quarantine, so that they can be said to be
    passed over, and a run whose checkpoints all failed doesn't look like one that never began.
    """
    line = [entry for entry in reversed(series.entries) if entry.on_line]
    if any(entry.own for entry in line):
        line = [entry for entry in line if entry.own or entry.index is None]
    for sequence, folder in series.quarantined:
        later = [at for at, entry in enumerate(line) if entry.own and (entry.sequence or 0) > sequence]
        line.insert(later[-1] + 1 if later else 0, quarantined_entry(series.run_dir, folder))
    return line


def quarantined_entry(run_dir: Path, folder: str) -> Entry:
    """A checkpoint that was found corrupt and moved to this folder of the quarantine."""
    name, _ = parse_quarantine_folder(folder) or (folder, 0)
    step, repeat = parse_step_folder(name) or (0, 0)
    return Entry(
        name=name, path=run_dir / QUARANTINE_DIR / folder, step=step, repeat=repeat, index=None,
        status="corrupt", reason=f"it failed its check and lies in {QUARANTINE_DIR}/{folder}",
    )  # fmt: skip


def _names(folder: Path) -> list[tuple[str, bool]]:
    try:
        with os.scandir(folder) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_steadily(run_dir: Path, seen: Iterable[Entry]) -> tuple[Listing, list[Entry]]:
    """List until two listings, one begun after the other ended, show the same; read it in between."""
    before = list_run(run_dir)
    known = {entry.name: entry for entry in seen if entry.status == "committed" and _is_still(entry)}
    for _ in range(_MAX_LISTINGS):
        read = {name: known.get(name) or read_entry(run_dir / name) for name in before.steps}
        known = {name: entry for name, entry in read.items() if entry is not None}
        after = list_run(run_dir)
        if after.steps == before.steps:
            break
        before = after
    # Under a storm of renames the last listing is still one that a rename finished before.
    return before, [entry for name, entry in known.items() if name in before.steps]


def _is_still(entry: Entry) -> bool:
    """Whether it is the folder that was read."""
    try:
        return folder_identity(os.lstat(entry.path)) == entry.identity
    except OSError:
        return False


def _refuse_if_machine_fails(run_dir: Path, read: Iterable[Entry], decisions: Decisions) -> None:
    """For want of descriptors or memory everything seems unreadable: no answer is better than that one."""
    for number in [*(entry.error for entry in read), *decisions.errors]:
        if number in MACHINE_ERRORS:
            raise read_failed(OSError(number, os.strerror(number)), run_dir)


def _id_of_highest(entries: Iterable[Entry]) -> str:
    indexes = [entry.index for entry in entries if entry.index is not None]
    return max(indexes, key=lambda index: index.sequence).run_id if indexes else ""


def _placed(entries: list[Entry], line: Line, cache: RunIndex) -> list[Entry]:
    """In order, with line and marks."""
    marks = {mark.name: mark for mark in cache.marks}
    foreign_line = line_of([e.index for e in entries if e.index is not None and not e.own], (), (), ())
    placed = []
    for entry in _in_order(entries):
        on_line = entry.index is None or entry.index.sequence in (line if entry.own else foreign_line)
        verified = named = False
        if (
            (mark := marks.get(entry.name)) is not None
            and entry.index is not None
            and entry.status == "committed"
        ):
            named = (mark.sequence, mark.index_sha256) == (entry.index.sequence, entry.index.index_sha256)
            verified = named and mark.stat_signature == stat_signature(entry.path)
        placed.append(replace(entry, on_line=on_line, verified=verified, changed=named and not verified))
    return placed


def _in_order(entries: list[Entry]) -> list[Entry]:
    """By sequence. Those that have none are never chosen; they go where the cache or their step puts them."""
    known = [(entry.step, entry.index.sequence) for entry in entries if entry.index is not None]

    def key(entry: Entry) -> tuple[int, int, int, int]:
        if entry.index is not None:
            return entry.index.sequence, 0, entry.step, entry.repeat
        guess = max((sequence for step, sequence in known if step <= entry.step), default=-1)
        return guess if entry.hint is None else entry.hint, 1, entry.step, entry.repeat

    return sorted(entries, key=key)
