"""Telling a checkpoint from a copy of its index: what the run's index knew of a folder's name. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckptd.disk.entry import Entry
from ckptd.disk.run_index import RunIndex


def without_copies(entries: Iterable[Entry], cache: RunIndex) -> list[Entry]:
    """The entries; of those with one and the same index only one keeps it, the others are corrupt.

    A sequence is given once. The one that keeps its index is whole, has that sequence in the run's index, or
    has the lower name.
    """
    hints = _sequences(cache)
    holder: dict[str, Entry] = {}

    def rank(entry: Entry) -> tuple[bool, bool, int, int]:
        return entry.status != "committed", hints.get(entry.name) != entry.sequence, entry.step, entry.repeat

    entries = list(entries)
    for entry in sorted(entries, key=rank):
        if entry.index is not None:
            holder.setdefault(entry.index.index_sha256, entry)

    def checked(entry: Entry) -> Entry:
        if entry.index is None:
            return entry
        held = holder[entry.index.index_sha256]
        if held is entry:
            return entry
        reason = f"index.json is that of another checkpoint, {held.name}"
        return replace(entry, index=None, status="corrupt", reason=reason, error=0)

    return [checked(entry) for entry in entries]


def hinted(entries: Iterable[Entry], cache: RunIndex) -> list[Entry]:
    """The entries; those without an index with the sequence that the run's index has for their name."""
    hints = _sequences(cache)
    return [e if e.index is not None else replace(e, hint=hints.get(e.name)) for e in entries]


def _sequences(cache: RunIndex) -> dict[str, int]:
    return {summary.name: summary.sequence for summary in cache.checkpoints}
