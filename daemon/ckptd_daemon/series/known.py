"""What is asked about a run's checkpoints at every commit, kept up entry by entry: no answer goes through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptd.disk.entry import Entry
from ckptd_daemon.series.retention import Candidate
from ckptd_daemon.series.standings import Standings


class Known:
    """The entries of one run. An entry never changes; it is replaced.

    Args:
        entries: In the order of the series.
        failed: Name → fault, of those that failed their check. An entry is put again when that changes.

    Attributes:
        entries: Name → entry, in the order of the series.
        odd: Of those that aren't committed, or aren't the run's own.
        standings: All of them as retention sees them.
        bytes: Of all.
        verified: How many are.
    """

    def __init__(self, entries: Iterable[Entry] = (), failed: Mapping[str, str] | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        self.odd: dict[str, Entry] = {}
        self.standings = Standings()
        self.bytes = self.verified = 0
        self._by_snapshot: dict[tuple[str, int], Entry] = {}
        self._last_snapshot: dict[str, int] = {}  # at least that: it doesn't fall when one goes
        self._repeats: dict[int, set[int]] = {}  # by step
        self._highest, self._heads = 0, dict[str, None]()
        for entry in entries:
            self.put(entry, (failed or {}).get(entry.name, ""))

    def put(self, entry: Entry, fault: str = "") -> None:
        """It is there, at the end, or in the place of the one of its name; fault: why it failed its check."""
        self._leave(entry.name)
        self.entries[entry.name] = entry
        self._repeats.setdefault(entry.step, set()).add(entry.repeat)
        self.standings.put(_candidate(entry, fault))
        if entry.status != "committed" or not entry.own:
            self.odd[entry.name] = entry
        self.verified += entry.verified
        if (key := snapshot_of(entry)) is not None:
            self._by_snapshot[key] = entry
            self._last_snapshot[key[0]] = max(key[1], self._last_snapshot.get(key[0], 0))
        if entry.index is not None:
            self.bytes += entry.index.total_bytes
            self._may_be_head(entry.name, entry.index.sequence)

    def drop(self, name: str) -> None:
        """There is none of that name any more."""
        self._leave(name)
        self.standings.drop(name)
        self.entries.pop(name, None)

    def find(self, client_id: str, snapshot: int) -> Entry | None:
        """The checkpoint of this snapshot, if it seems whole."""
        return self._by_snapshot.get((client_id, snapshot))

    def is_newest_of(self, client_id: str, snapshot: int) -> bool:
        """Whether no later one of that client is known. False may be wrong."""
        return snapshot > self._last_snapshot.get(client_id, -1)

    def heads(self) -> list[Entry]:
        """Those of the highest sequence: one, or copies of it."""
        if not self._heads:  # the last one went
            self._highest = 0
            for entry in self.entries.values():
                if entry.index is not None:
                    self._may_be_head(entry.name, entry.index.sequence)
        return [self.entries[name] for name in self._heads]

    def free_repeat(self, step: int) -> int:
        """The lowest above those of that step."""
        return 1 + max(self._repeats.get(step, ()), default=0)

    def _may_be_head(self, name: str, sequence: int) -> None:
        if sequence > self._highest:
            self._highest = sequence
            self._heads.clear()
        if sequence == self._highest:
            self._heads[name] = None

    def _leave(self, name: str) -> None:
        """What is kept of the entry of that name, but its place."""
        entry = self.entries.get(name)
        if entry is None:
            return
        self.odd.pop(name, None)
        self._heads.pop(name, None)
        self.verified -= entry.verified
        self.bytes -= entry.index.total_bytes if entry.index is not None else 0
        key = snapshot_of(entry)
        if key is not None and self._by_snapshot.get(key) is entry:
            del self._by_snapshot[key]
        repeats = self._repeats[entry.step]
        repeats.discard(entry.repeat)
        if not repeats:
            del self._repeats[entry.step]


def snapshot_of(entry: Entry) -> tuple[str, int] | None:
    """Client and number of the snapshot that it is of, where it is whole as far as can be told."""
    if not entry.own or entry.index is None or entry.status not in ("committed", "unreadable"):
        return None
    return entry.index.client_id, entry.index.snapshot


def _candidate(entry: Entry, fault: str) -> Candidate:
    return Candidate(
        name=entry.name, sequence=entry.sequence, own=entry.own, on_line=entry.on_line,
        verified=entry.verified, failed=fault or entry.reason,
        metrics=entry.index.metrics if entry.index is not None else {},
    )  # fmt: skip
