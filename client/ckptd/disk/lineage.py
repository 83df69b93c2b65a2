"""Lines: which checkpoints lead to the head, and where a new one goes. Pure: values in, decisions out.

What must stay true:

- The line is that of the newest checkpoint whose index can be read, or of a newer fork that took effect.
- A fork is recorded before its first checkpoint is committed, and takes effect when something of the new line
  is on disk (in the run, trash or quarantine). So a head that fails, even the first of its line, falls back
  along its own line, and never to one that was abandoned; a fork whose commit never happened changes nothing.
- Whoever commits after a fork that never happened records a fork of its own, which is newer and so counts.
- Restoring alone moves nothing, and restoring nothing means going on from the head. Restoring what isn't of
  this run (a warm start) is not restoring nothing: what is committed then forks from nothing, or a fall-back
  would one day bring back a state that the run's user had replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ckptd.disk.decisions import Fork
from ckptd.format.records import CheckpointIndex, Lineage


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the run a new checkpoint goes.

    Attributes:
        run_id: The run's.
        sequence: Its own.
        parent: Sequence of the checkpoint it goes on from; None when it begins from nothing.
        lineage: Closed, ascending ranges of the sequences on its line, itself the last.
        forks: A fork has to be recorded before it is committed.
        repeat: How often its step has been committed then, if its name is free; None: the run's folder has to tell.
    """

    run_id: str
    sequence: int
    parent: int | None
    lineage: Lineage
    forks: bool
    repeat: int | None = None

    @classmethod
    def alone(cls, run_id: str) -> Position:
        """That of a checkpoint outside any series."""
        return cls(run_id, 1, None, ((1, 1),), forks=False)


@dataclass(frozen=True, slots=True)
class Line:
    """The sequences on the line: those in `ranges`, and everything from `opens_at` on."""

    ranges: Lineage
    opens_at: int

    def __contains__(self, sequence: int) -> bool:
        return sequence >= self.opens_at or any(low <= sequence <= high for low, high in self.ranges)


def line_of(
    own: Sequence[CheckpointIndex],
    forks: Sequence[Fork],
    moved: Collection[int],
    unreadable_names: Collection[str],
) -> Line:
    """The line that ends at the head.

    Args:
        own: The run's own checkpoints whose index can be read.
        forks: All forks recorded, by sequence.
        moved: Sequences in trash and quarantine.
        unreadable_names: Names of checkpoint folders whose index can't be read.
    """
    newest = max(own, key=lambda index: index.sequence, default=None)
    highest = max([-1 if newest is None else newest.sequence, *moved])
    effective = [fork for fork in forks if fork.sequence <= highest or fork.name in unreadable_names]
    last = effective[-1] if effective else None
    if last is not None and (newest is None or last.sequence > newest.sequence):
        return Line(ranges_to(last.parent, own, effective), last.sequence)
    if newest is None:
        return Line((), 0)
    return Line(newest.lineage, newest.sequence + 1)


def ranges_to(sequence: int | None, own: Sequence[CheckpointIndex], forks: Sequence[Fork]) -> Lineage:
    """The ranges of the line that ends at `sequence`, also when that checkpoint is gone."""
    if sequence is None:
        return ()
    for index in reversed(
        own
    ):  # most often it is the newest one's; whichever has it, its ranges up to it are the same
        if any(low <= sequence <= high for low, high in index.lineage):
            return tuple((low, min(high, sequence)) for low, high in index.lineage if low <= sequence)
    before = [fork for fork in forks if fork.sequence <= sequence]
    if not before:
        return ((1, sequence),) if sequence else ((0, 0),)
    return (*ranges_to(before[-1].parent, own, before[:-1]), (before[-1].sequence, sequence))


def place(parent: CheckpointIndex | None, sequence: int, known_sequences: Iterable[int]) -> Lineage:
    """The lineage of a checkpoint `sequence` that goes on from parent (None: from nothing)."""
    if parent is None:
        return ((sequence, sequence),)
    return _extended(parent.lineage, sequence, known_sequences)


def longer(
    head: CheckpointIndex, line: Line, *, run_id: str, sequence: int, client_id: str, base_snapshot: int
) -> Position | None:
    """What next_position gives when the client's own newest is the newest of all; None when it isn't.

    Args:
        head: The run's own checkpoint of the highest sequence, which is also the highest known anywhere in the run.
        line: The present line.
        run_id, sequence: The new checkpoint's.
        client_id, base_snapshot: As in the descriptor.
    """
    mine = head.client_id == client_id and head.snapshot > base_snapshot
    if not mine or sequence <= head.sequence or line != Line(head.lineage, head.sequence + 1):
        return None
    *closed, (low, _) = head.lineage
    return Position(run_id, sequence, head.sequence, (*closed, (low, sequence)), forks=False)


def next_position(
    own: Sequence[CheckpointIndex], forks: Sequence[Fork], line: Line, known_sequences: Collection[int], *,
    run_id: str, sequence: int, client_id: str, base_sequence: int | None, base_snapshot: int = 0,
    base_before: Sequence[int] = (), begins_line: bool = False,
) -> Position:  # fmt: skip
    """Where a client's next snapshot goes.

    Args:
        own: The run's own checkpoints whose index can be read.
        forks: All forks recorded, by sequence.
        line: The present line (line_of).
        known_sequences: Every sequence seen anywhere in the run: folders, temp, trash, quarantine, decisions.
        run_id, sequence: The new checkpoint's.
        client_id, base_sequence, base_snapshot, base_before, begins_line: As in the descriptor.
    """
    mine = [
        index.sequence for index in own if index.client_id == client_id and index.snapshot > base_snapshot
    ]
    if mine:
        parent: int | None = max(mine)
    elif begins_line:
        parent = None
    else:
        parent = _restored(own, line, known_sequences, base_sequence, base_before)
    if parent is None:
        ranges: Lineage = ((sequence, sequence),)
    else:
        ranges = _extended(ranges_to(parent, own, forks), sequence, known_sequences)
    between = _any_between(-1 if parent is None else parent, sequence, known_sequences)
    return Position(run_id, sequence, parent, ranges, forks=between)


def head_of(own: Iterable[CheckpointIndex], line: Line) -> CheckpointIndex | None:
    """The newest checkpoint on the line; None when there is none."""
    on_line = (index for index in own if index.sequence in line)
    return max(on_line, key=lambda index: index.sequence, default=None)


def _restored(
    own: Sequence[CheckpointIndex],
    line: Line,
    known: Collection[int],
    base: int | None,
    before: Sequence[int],
) -> int | None:
    if base is None:
        head = head_of(own, line)
        return None if head is None else head.sequence
    seen = {index.sequence for index in own}.union(known)
    for sequence in (base, *before):  # what was restored from a slot and never written left nothing
        if sequence in seen:
            return sequence
    if any(index.sequence >= base for index in own):
        return base
    return None  # of a copy of this run that went further, or all is gone: this run's line begins here


def _extended(ranges: Lineage, sequence: int, known_sequences: Iterable[int]) -> Lineage:
    """Add sequence: to the last range when nothing lies between them, else as a range of its own."""
    low, high = ranges[-1]
    if _any_between(high, sequence, known_sequences):
        return (*ranges, (sequence, sequence))
    return (*ranges[:-1], (low, sequence))


def _any_between(low: int, high: int, sequences: Iterable[int]) -> bool:
    return any(low < sequence < high for sequence in sequences)
