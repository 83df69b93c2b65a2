"""What the daemon knows of one run between two looks at its folder: entries, marks, failures, the line.

Folders and decisions are the truth. This is read from them, kept up with what the daemon itself does, and
read anew whenever the names in the folder differ. It changes nothing on disk.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, KeysView
from dataclasses import replace
from pathlib import Path

from ckptd.disk.decisions import Decisions, read_decisions
from ckptd.disk.lineage import Line, line_of
from ckptd.disk.rootdir import Root
from ckptd.disk.run_index import Mark, Recent, RunIndex, folder_token, read_run_index
from ckptd.disk.series_entries import Entry, Series, list_run, list_steps, read_series
from ckptd.disk.verification import Report, stat_signature
from ckptd_daemon.series.candidates import Candidates
from ckptd_daemon.series.index_rows import rows
from ckptd_daemon.series.retention import Candidate


class RunView:
    """One run. Used by one thread, under the root's lock.

    Attributes:
        series: The run as last seen, its marks and line brought up to date.
        failed: Name → fault, of those that failed their check and are still in place.
        decisions_unread: Why the decisions can't even be listed; "" when they can.
        touched: Names that came or whose mark changed, since whoever writes the run's index emptied it; None when
            anything may have changed.
    """

    def __init__(self, root: Root, run: str) -> None:
        self._root = root
        self.run = run
        self.run_dir: Path = root.run_dir(run)
        self.failed: dict[str, str] = {}
        self._failed_as: dict[str, str] = {}
        self.decisions_unread = ""
        self._moved: set[int] = set()
        self.touched: set[str] | None = None
        self._entries: dict[str, Entry] = {}
        self._by_snapshot: dict[tuple[str, int], Entry] = {}
        self._tokens: dict[str, str] = {}
        self._sequences: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._candidates = Candidates()
        cached = read_run_index(self.run_dir)
        self._marks = {mark.name: mark for mark in cached.marks} if cached is not None else {}
        self.series: Series = read_series(root, run)
        self._read(self.series)

    @property
    def run_id(self) -> str:
        return self.series.run_id

    @property
    def names(self) -> KeysView[str]:
        """Of all entries."""
        return self._entries.keys()

    def __getitem__(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def named(self, run_id: str) -> None:
        """The run got its id."""
        self.series = replace(self.series, run_id=run_id)

    def rescan(self, *, always: bool = False) -> list[str]:
        """Read the run again if its names differ or one couldn't be read (or always); the names that are new."""
        known = frozenset(self._entries)
        if not always and not self.in_doubt() and list_steps(self.run_dir, known) == known:
            return []
        series, seen = read_series(self._root, self.run), self.series
        self._read(
            replace(
                series, run_id=seen.run_id or series.run_id, decisions=self._with_known(series.decisions),
                known_sequences=series.known_sequences | seen.known_sequences,
                next_sequence=max(series.next_sequence, seen.next_sequence),
            )
        )  # fmt: skip
        return [entry.name for entry in self.series.entries if entry.name not in known]

    def read_decisions(self) -> None:
        """See what was decided since."""
        try:
            decisions = self._with_known(read_decisions(self.run_dir))
        except OSError as error:
            self.decisions_unread = f"decisions: {error}"
            return
        self.decisions_unread = ""
        if decisions != self.series.decisions:
            self.series = replace(self.series, decisions=decisions)
            self._set(self.series.entries)

    def _with_known(self, now: Decisions) -> Decisions:
        """Decisions never change: one that can't be read now still is what it was."""
        if not now.errors:
            return now
        before = self.series.decisions
        forks = sorted({*before.forks, *now.forks}, key=lambda fork: fork.sequence)
        birth = now.birth_run_id or before.birth_run_id
        return replace(now, birth_run_id=birth, forks=tuple(forks))

    def put(self, entry: Entry) -> None:
        """This one is there now."""
        sequence = entry.sequence
        if sequence is not None:
            highest = max(self.series.next_sequence, sequence + 1)
            known = self.series.known_sequences | {sequence}
            self.series = replace(self.series, known_sequences=known, next_sequence=highest)
        goes_on = self._goes_on(entry)
        self._marks.pop(entry.name, None)
        self.failed.pop(entry.name, None)
        if goes_on and entry.index is not None:
            line = Line(entry.index.lineage, entry.index.sequence + 1)
            self._entries[entry.name] = entry
            self._by_snapshot[entry.index.client_id, entry.index.snapshot] = entry
            self._know(entry)
            self.series = replace(self.series, entries=tuple(self._entries.values()), line=line)
        else:
            self._set([*(e for e in self.series.entries if e.name != entry.name), entry])
        self._touch(entry.name)

    def _goes_on(self, entry: Entry) -> bool:
        """Whether it only makes the line longer, so that for all the others everything stays as it is."""
        ranges, index = self.series.line.ranges, entry.index
        if not ranges or index is None or not entry.own or self[entry.name] is not None:
            return False
        # A lineage that is the line with a longer last range says that nothing known lies between the two.
        *closed, (first, _) = ranges
        return index.lineage == (*closed, (first, index.sequence))

    def drop(self, names: Collection[str], *, moved: int | None = None) -> None:
        """These are no longer there; moved: the sequence of the one that went to quarantine."""
        if moved is not None:
            self._moved.add(moved)
        for name in names:
            self._marks.pop(name, None)
            self.failed.pop(name, None)
        if moved is None and self._are_amid(names):
            self._take_out(names)
        else:
            self._set([entry for entry in self.series.entries if entry.name not in names])

    def _are_amid(self, names: Collection[str]) -> bool:
        """Whether the line is the same without them: an own one of theirs is newer than each."""
        gone = [self._entries[name] for name in names if name in self._entries]
        rest = (e.sequence for e in reversed(self._entries.values()) if e.own and e.name not in names)
        newest = next((sequence for sequence in rest if sequence is not None), -1)
        return all(entry.sequence is not None and entry.sequence < newest for entry in gone)

    def _take_out(self, names: Collection[str]) -> None:
        for name in names:
            entry = self._entries.pop(name, None)
            for known in (self._tokens, self._sequences, self._bytes):
                known.pop(name, None)
            self._candidates.drop(name)
            key = None if entry is None else self._key(entry)
            if key is not None and self._by_snapshot.get(key) is entry:
                del self._by_snapshot[key]
        self.series = replace(self.series, entries=tuple(self._entries.values()))

    def mark(self, entry: Entry, report: Report) -> None:
        """It was verified."""
        self.failed.pop(entry.name, None)
        self._marks[entry.name] = Mark(
            name=entry.name, sequence=report.sequence or 0, index_sha256=report.index_sha256,
            stat_signature=report.stat_signature, how=report.how, verified_at=time.time(),
        )  # fmt: skip
        self._set_verified(entry.name, True)

    def unmark(self, name: str) -> None:
        """It isn't verified any more."""
        self._marks.pop(name, None)
        self._set_verified(name, False)

    def _set_verified(self, name: str, verified: bool) -> None:
        """The line doesn't depend on it."""
        self._touch(name)
        if (seen := self._entries.get(name)) is None:
            return
        entry = self._entries[name] = replace(seen, verified=verified)
        self.series = replace(self.series, entries=tuple(self._entries.values()))
        if (key := self._key(entry)) is not None:
            self._by_snapshot[key] = entry

    def _touch(self, name: str) -> None:
        if self.touched is not None:
            self.touched.add(name)

    def fail(self, name: str, fault: str, report: Report) -> None:
        """It failed its check, and is still in place."""
        self.failed[name] = fault
        self._failed_as[name] = report.stat_signature
        self.unmark(name)

    def still_failed(self, name: str) -> bool:
        """Whether it failed its check and hasn't changed since, as far as a look tells."""
        seen = stat_signature(self.run_dir / name)
        return name in self.failed and seen != "" and self._failed_as.get(name) == seen

    def was_verified(self, entry: Entry) -> bool:
        """Whether it was verified once, also if it has changed since."""
        mark, index = self._marks.get(entry.name), entry.index
        return mark is not None and index is not None and mark.index_sha256 == index.index_sha256

    def unchanged(self, name: str) -> bool:
        """Whether a verified one still has the files that were verified, as far as a look tells."""
        mark = self._marks.get(name)
        return mark is not None and mark.stat_signature == stat_signature(self.run_dir / name)

    def can_be_looked_at(self, name: str) -> bool:
        """Whether its folder can be listed now; else nothing can be said about its files."""
        return stat_signature(self.run_dir / name) != ""

    def find(self, client_id: str, snapshot: int) -> Entry | None:
        """The checkpoint of this snapshot, if it is here and seems whole."""
        return self._by_snapshot.get((client_id, snapshot))

    def in_doubt(self) -> list[str]:
        """Checkpoints that can't be read now and may be ours, in words; while there is one, nothing is removed."""
        unread = [entry for entry in self.series.entries if entry.status == "unreadable"]
        return [f"{entry.name}: {entry.reason}" for entry in unread if entry.is_in_doubt]

    def unreadable_decisions(self) -> list[str]:
        """Each in words; while there is one, nothing is removed."""
        said = [f"{name}: {reason}" for name, reason in self.series.decisions.unreadable]
        return [*said, self.decisions_unread] if self.decisions_unread else said

    def candidates(self) -> list[Candidate]:
        """The entries as retention sees them."""
        return [self._candidates.of(e, self.failed.get(e.name, "") or e.reason) for e in self.series.entries]

    def run_index(self) -> RunIndex:
        """The cache to write."""
        marks, checkpoints = rows(self.series.entries, self._marks)
        return RunIndex(
            run=self.run, run_id=self.run_id, highest_sequence=self.series.next_sequence - 1, marks=marks,
            checkpoints=checkpoints,
        )  # fmt: skip

    def recent(self, base: str) -> Recent:
        """What is to be written beside that index.json: of those touched, and of the newest."""
        highest = max(self._sequences.values(), default=0)
        newest = [name for name, sequence in self._sequences.items() if sequence == highest]
        wanted = {*(self.touched or ()), *newest}
        marks, checkpoints = rows([e for n in wanted if (e := self._entries.get(n)) is not None], self._marks)
        return Recent(
            run=self.run, run_id=self.run_id, highest_sequence=self.series.next_sequence - 1, marks=marks,
            checkpoints=checkpoints, base=base, known=self.known_folders(),
        )  # fmt: skip

    def known_folders(self) -> str:
        """As recent.json has it."""
        return " ".join(self._tokens.values())

    def bytes(self) -> int:
        """Of all its checkpoints."""
        return sum(self._bytes.values())

    def _read(self, series: Series) -> None:
        """Take over what was read from disk; of what is ours and what is verified, we know more."""
        self._moved |= list_run(self.run_dir).moved
        self.touched = None
        before = {entry.name: entry for entry in self.series.entries}
        self.series = series
        there = {entry.name for entry in series.entries}
        self.failed = {name: fault for name, fault in self.failed.items() if name in there}
        entries = _in_order([_with_index(entry, before.get(entry.name)) for entry in series.entries])
        self._set([replace(e, own=self._is_own(e), verified=self._is_marked(e)) for e in entries])

    def _is_own(self, entry: Entry) -> bool:
        return entry.index is not None and entry.index.run_id == self.run_id

    def _is_marked(self, entry: Entry) -> bool:
        mark = self._marks.get(entry.name)
        if mark is None or entry.index is None or entry.status not in ("committed", "unreadable"):
            return False
        same = (mark.sequence, mark.index_sha256) == (entry.index.sequence, entry.index.index_sha256)
        return same and (self.unchanged(entry.name) or not stat_signature(entry.path))

    def _set(self, entries: Iterable[Entry]) -> None:
        """These are the entries now: work out the line, and who is on it."""
        ordered = tuple(entries)
        own = [entry.index for entry in ordered if entry.own and entry.index is not None]
        unreadable = {entry.name for entry in ordered if entry.index is None}
        line = line_of(own, self.series.decisions.forks, self._moved, unreadable)
        placed = []
        for entry in ordered:
            on_line = entry.index.sequence in line if entry.own and entry.index is not None else entry.on_line
            placed.append(entry if entry.on_line is on_line else replace(entry, on_line=on_line))
        self.series = replace(self.series, entries=tuple(placed), line=line)
        self._entries = {entry.name: entry for entry in placed}
        self._by_snapshot = {key: entry for entry in placed if (key := self._key(entry)) is not None}
        self._candidates.keep(self._entries)
        for known in (self._tokens, self._sequences, self._bytes):
            known.clear()
        for entry in placed:
            self._know(entry)

    def _know(self, entry: Entry) -> None:
        """What is asked of it again and again."""
        if entry.index is not None:
            self._sequences[entry.name] = entry.index.sequence
            self._bytes[entry.name] = entry.index.total_bytes
            if entry.identity:
                self._tokens[entry.name] = folder_token(entry.name, entry.identity.partition(" ")[0])

    def _key(self, entry: Entry) -> tuple[str, int] | None:
        """Of which snapshot of which client it is, where it is whole as far as can be told."""
        if not entry.own or entry.index is None or entry.status not in ("committed", "unreadable"):
            return None
        return entry.index.client_id, entry.index.snapshot


def _with_index(now: Entry, before: Entry | None) -> Entry:
    """A committed checkpoint never changes: one that can't be read now still is what it was."""
    if now.status != "unreadable" or now.index is not None or before is None or before.index is None:
        return now
    status = now.status if before.status == "committed" else before.status
    return replace(now, index=before.index, status=status, on_line=before.on_line)


def _in_order(entries: list[Entry]) -> list[Entry]:
    """As they are, with those whose index was known where their sequence puts them."""
    if all(entry.index is None or entry.status != "unreadable" for entry in entries):
        return entries
    last = -1
    keyed: list[tuple[int, int, Entry]] = []
    for entry in entries:
        last = entry.sequence if entry.sequence is not None else last
        keyed.append((last, len(keyed), entry))
    return [entry for _, _, entry in sorted(keyed, key=lambda key: key[:2])]
