"""The checkpoints of a run as retention sees them, each made once: to make one costs more than to decide about it."""

from __future__ import annotations

from collections.abc import Collection

from ckptd.disk.entry import Entry
from ckptd_daemon.series.retention import Candidate


class Candidates:
    """Of one run."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Entry, str, Candidate]] = {}

    def of(self, entry: Entry, failed: str) -> Candidate:
        """The one of an entry, and of why it failed; entries never change, they are replaced."""
        made = self._made.get(entry.name)
        if made is None or made[0] is not entry or made[1] != failed:
            made = self._made[entry.name] = entry, failed, _candidate(entry, failed)
        return made[2]

    def drop(self, name: str) -> None:
        """There is none of that name any more."""
        self._made.pop(name, None)

    def keep(self, names: Collection[str]) -> None:
        """There are none but those."""
        self._made = {name: made for name, made in self._made.items() if name in names}


def _candidate(entry: Entry, failed: str) -> Candidate:
    return Candidate(
        name=entry.name, sequence=entry.sequence, own=entry.own, on_line=entry.on_line,
        verified=entry.verified, failed=failed,
        metrics=entry.index.metrics if entry.index is not None else {},
    )  # fmt: skip
