"""Where snapshots go that were accepted and not written yet. Pure: values in, decisions out.

A client may restore one of them from its slot before it is a checkpoint. Nobody knows then whether it ever becomes
one (the disk may be full), so what the client saves next must find its place either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.disk.series_entries import Series
from ckptd.limits import MAX_BASES
from ckptd.snapshot.descriptor import Descriptor

__all__ = ["Accepted", "bases_of_last", "becomes_head", "is_overtaken"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A snapshot that was given its sequence and isn't written yet."""

    sequence: int
    descriptor: Descriptor


def becomes_head(series: Series, last: Accepted) -> bool:
    """Whether the last of the accepted ones will be the head of the line when all are written.

    What was written after it, or is written already, or can't be read now, decides otherwise.
    """
    d = last.descriptor
    written = any((index.client_id, index.snapshot) == (d.client_id, d.snapshot) for index in series.own)
    higher = any(index.sequence >= last.sequence for index in series.own)
    moved = any(sequence >= last.sequence for sequence in series.known_sequences if sequence != last.sequence)
    doubt = any(entry.is_in_doubt for entry in series.entries)
    return not (written or higher or moved or doubt or is_overtaken(series, last))


def is_overtaken(series: Series, accepted: Accepted) -> bool:
    """Whether what is on disk says that this one isn't to be written any more.

    A newer snapshot of its client with a lower sequence: written, the older would be the latest. Or one of anybody
    with a higher sequence: snapshots are written in their order, so this one has failed before that, or it did become
    a checkpoint that retention has removed since, when a start couldn't read the slot that a killed daemon left.
    """
    d = accepted.descriptor
    written = [
        entry.index for entry in series.entries if entry.own and entry.status == "committed" and entry.index
    ]
    return any(
        index.sequence > accepted.sequence or (index.client_id == d.client_id and index.snapshot > d.snapshot)
        for index in written
    )


def bases_of_last(series: Series, accepted: Sequence[Accepted]) -> tuple[int, ...] | None:
    """What the last one goes on from, nearest first: some of them may never be written, the last one may be.

    Args:
        series: The run as it is on disk.
        accepted: By sequence.

    Returns:
        Sequences; None when they are too many to be said in a descriptor.
    """
    *before, last = accepted
    d = last.descriptor
    mine = [
        one.sequence for one in before if _is_of_line(one.descriptor.client_id, one.descriptor.snapshot, d)
    ]
    written = [index.sequence for index in series.own if _is_of_line(index.client_id, index.snapshot, d)]
    bases = {*mine, *written}
    if not written:
        bases |= _restored_by(d, series, before)
    chain = tuple(sorted((base for base in bases if base < last.sequence), reverse=True))
    return chain if len(chain) <= MAX_BASES else None


def _is_of_line(client_id: str, snapshot: int, d: Descriptor) -> bool:
    return client_id == d.client_id and d.base_snapshot < snapshot < d.snapshot


def _restored_by(d: Descriptor, series: Series, before: Sequence[Accepted]) -> set[int]:
    """What the client of `d` went on from: what it restored, or else the head, whichever that will be."""
    if d.begins_line:
        return set()
    if d.base_sequence is not None:
        return {d.base_sequence, *d.base_before}
    head = series.head
    others = {one.sequence for one in before if one.descriptor.client_id != d.client_id}
    return others if head is None else others | {head.sequence}
