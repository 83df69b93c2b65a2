"""A run's entries as its index has them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptd.disk.entry import Entry
from ckptd.disk.run_index import Mark, Summary
from ckptd.format.records import CheckpointIndex


def rows(entries: Iterable[Entry], marks: Mapping[str, Mark]) -> tuple[tuple[Mark, ...], tuple[Summary, ...]]:
    """The marks and summaries of those whose index can be read."""
    readable = [(entry, entry.index) for entry in entries if entry.index is not None]
    return (
        tuple(marks[entry.name] for entry, _ in readable if entry.verified),
        tuple(_summary(entry, index) for entry, index in readable),
    )


def _summary(entry: Entry, index: CheckpointIndex) -> Summary:
    return Summary(
        name=entry.name, step=index.step, sequence=index.sequence, saved_at=index.saved_at,
        bytes=index.total_bytes, metrics=dict(index.metrics), identity=entry.identity,
    )  # fmt: skip
