"""What the daemon knows of one run between two looks at its folder: entries, marks, failures, the line.

Folders and decisions are the truth. This is read from them, kept up with what the daemon itself does, and
read anew whenever the names in the folder differ: which the kernel tells of (`name_watch`), or else a listing.
It changes nothing on disk. A commit, a mark, a removal costs the same however many checkpoints there are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, KeysView
from dataclasses import replace
from pathlib import Path

from ckptd.disk.decisions import Decisions, read_decisions
from ckptd.disk.lineage import Line, Position, line_of, longer
from ckptd.disk.newest_file import Newest
from ckptd.disk.rootdir import Root
from ckptd.disk.run_index import Mark, Recent, RunIndex, read_run_index, token_of
from ckptd.disk.series_entries import Entry, Series, list_run, read_series
from ckptd.disk.verification import Report, stat_signature
from ckptd.snapshot.descriptor import Descriptor
from ckptd_daemon.series.folder_names import FolderNames
from ckptd_daemon.series.index_rows import rows
from ckptd_daemon.series.known import Known
from ckptd_daemon.series.name_watch import NameWatch


class RunView:
    """One run. Used by one thread, under the root's lock.

    Args:
        root: The root.
        run: The run's name.
        watch: Tells which names changed. None: the folder is listed each time.

    Attributes:
        known: Its entries, as they are asked for.
        failed: Name → fault, of those that failed their check and are still in place.
        decisions_unread: Why the decisions can't even be listed; "" when they can.
        touched: Names that came or went or whose mark changed, since whoever writes the run's index emptied it; None
            when anything may have changed.
        left: Names that went, since whoever asks for it emptied it.
        folder: Whether the names in its folder are known.
    """

    def __init__(self, root: Root, run: str, watch: NameWatch | None = None) -> None:
        self._root = root
        self.run = run
        self.run_dir: Path = root.run_dir(run)
        self.failed: dict[str, str] = {}
        self._failed_as: dict[str, str] = {}
        self.decisions_unread = ""
        self._moved: set[int] = set()
        self.touched: set[str] | None = None
        self.left: set[str] = set()
        self.known = Known()
        self._new_sequences: set[int] = set()
        self._behind = False
        self.folder = FolderNames(self.run_dir, watch)  # before it is read: what changes meanwhile is told
        cached = read_run_index(self.run_dir)
        self._marks = {mark.name: mark for mark in cached.marks} if cached is not None else {}
        self._series = read_series(root, run)
        self._read(self._series, marks_as_read=True)

    @property
    def series(self) -> Series:
        """The run as last seen, its marks and line brought up to date. To ask for it goes through all of it."""
        if self._behind:
            sequences = self._series.known_sequences | self._new_sequences
            entries = tuple(self.known.entries.values())
            self._series = replace(self._series, entries=entries, known_sequences=sequences)
            self._behind, self._new_sequences = False, set()
        return self._series

    @property
    def run_id(self) -> str:
        return self._series.run_id

    @property
    def next_sequence(self) -> int:
        """See Series."""
        return self._series.next_sequence

    @property
    def names(self) -> KeysView[str]:
        """Of all entries."""
        return self.known.entries.keys()

    def __getitem__(self, name: str) -> Entry | None:
        return self.known.entries.get(name)

    def named(self, run_id: str) -> None:
        """The run got its id."""
        self._series = replace(self.series, run_id=run_id)

    def rescan(self, *, always: bool = False) -> list[str]:
        """Read the run again if its names differ or one couldn't be read (or always); the names that are new."""
        if not always and not self.in_doubt() and self.folder.are_known(self.known.entries):
            return []
        known = frozenset(self.names)
        series, seen = read_series(self._root, self.run), self.series
        self._read(
            replace(
                series, run_id=seen.run_id or series.run_id, decisions=self._with_known(series.decisions),
                known_sequences=series.known_sequences | seen.known_sequences,
                next_sequence=max(series.next_sequence, seen.next_sequence),
            )
        )  # fmt: skip
        self.folder.read(len(known))
        return [entry.name for entry in self.series.entries if entry.name not in known]

    def free_repeat(self, step: int) -> int | None:
        """The lowest above all those of that step; None when the folder has to be listed for that."""
        with contextlib.suppress(OSError):
            if self.folder.told and self.folder.are_known(self.known.entries):
                return self.known.free_repeat(step)
        return None

    def read_decisions(self) -> None:
        """See what was decided since."""
        try:
            decisions = self._with_known(read_decisions(self.run_dir))
        except OSError as error:
            self.decisions_unread = f"decisions: {error}"
            return
        self.decisions_unread = ""
        if decisions != self._series.decisions:
            self._new_sequences.update(fork.sequence for fork in decisions.forks)
            self._behind = True
            highest = max(self.next_sequence, decisions.highest_sequence + 1)
            self._series = replace(self.series, decisions=decisions, next_sequence=highest)
            self._set(self._series.entries)

    def _with_known(self, now: Decisions) -> Decisions:
        """Decisions never change: one that can't be read now still is what it was."""
        if not now.errors:
            return now
        before = self._series.decisions
        forks = sorted({*before.forks, *now.forks}, key=lambda fork: fork.sequence)
        birth = now.birth_run_id or before.birth_run_id
        return replace(now, birth_run_id=birth, forks=tuple(forks))

    def put(self, entry: Entry) -> None:
        """This one is there now."""
        sequence = entry.sequence
        if sequence is not None:
            highest = max(self.next_sequence, sequence + 1)
            self._series = replace(self._series, next_sequence=highest)
            self._new_sequences.add(sequence)
        goes_on = self._goes_on(entry)
        self._behind = True
        self._marks.pop(entry.name, None)
        self.failed.pop(entry.name, None)
        self.left.discard(entry.name)
        if goes_on and entry.index is not None:
            line = Line(entry.index.lineage, entry.index.sequence + 1)
            self._series = replace(self._series, line=line)
            self.known.put(entry)
        else:
            self._set([*(e for e in self.series.entries if e.name != entry.name), entry])
        self._touch(entry.name)

    def _goes_on(self, entry: Entry) -> bool:
        """Whether it only makes the line longer, so that for all the others everything stays as it is."""
        ranges, index = self._series.line.ranges, entry.index
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
            self._touch(name)
        if moved is None and self._are_amid(names):
            self._behind = True
            self.left.update(names)
            for name in names:
                self.known.drop(name)
        else:
            self._set([entry for entry in self.series.entries if entry.name not in names])

    def _are_amid(self, names: Collection[str]) -> bool:
        """Whether the line is the same without them: an own one of theirs is newer than each."""
        gone = [entry for name in names if (entry := self[name]) is not None]
        rest = (e.sequence for e in reversed(self.known.entries.values()) if e.own and e.name not in names)
        newest = next((sequence for sequence in rest if sequence is not None), -1)
        return all(entry.sequence is not None and entry.sequence < newest for entry in gone)

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
        if (seen := self[name]) is not None:
            self._behind = True
            self.known.put(replace(seen, verified=verified), self.failed.get(name, ""))

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

    def going_on(self, descriptor: Descriptor, sequence: int) -> Position | None:
        """Where the next of the client that has the head goes, as `sequence`; None when that takes a look at all."""
        heads = self.known.heads()
        head = heads[0] if len(heads) == 1 else None
        if head is None or not head.own or not head.on_line or head.index is None or self.in_doubt():
            return None
        if head.index.sequence + 1 != self.next_sequence:
            return None
        return longer(
            head.index, self._series.line, run_id=self.run_id, sequence=sequence,
            client_id=descriptor.client_id, base_snapshot=descriptor.base_snapshot,
        )  # fmt: skip

    def is_newer_than_all(self, descriptor: Descriptor, sequence: int) -> bool:
        """Whether none of its client's snapshots is newer, and nothing has this sequence or a higher one."""
        newer = self.known.is_newest_of(descriptor.client_id, descriptor.snapshot)
        return newer and sequence >= self.next_sequence

    def in_doubt(self) -> list[str]:
        """Checkpoints that can't be read now and may be ours, in words; while there is one, nothing is removed."""
        unread = [entry for entry in self.known.odd.values() if entry.status == "unreadable"]
        return [f"{entry.name}: {entry.reason}" for entry in unread if entry.is_in_doubt]

    def unreadable_decisions(self) -> list[str]:
        """Each in words; while there is one, nothing is removed."""
        said = [f"{name}: {reason}" for name, reason in self._series.decisions.unreadable]
        return [*said, self.decisions_unread] if self.decisions_unread else said

    def run_index(self) -> RunIndex:
        """The cache to write."""
        marks, checkpoints = rows(self.series.entries, self._marks)
        return RunIndex(
            run=self.run, run_id=self.run_id, highest_sequence=self.next_sequence - 1, marks=marks,
            checkpoints=checkpoints,
        )  # fmt: skip

    def recent(self, base: str) -> Recent:
        """What is to be written beside that index.json: of those touched, and of the newest."""
        touched = self.touched or set()
        wanted = {*touched, *(entry.name for entry in self.known.heads())}
        marks, checkpoints = rows([e for n in wanted if (e := self[n]) is not None], self._marks)
        return Recent(
            run=self.run, run_id=self.run_id, highest_sequence=self.next_sequence - 1, marks=marks,
            checkpoints=checkpoints, base=base, gone=" ".join(sorted(touched - self.names)),
        )  # fmt: skip

    def folders(self) -> set[str]:
        """The token_of each that the run's index tells from others."""
        return {token for entry in self.known.entries.values() if (token := _token(entry))}

    def newest(self) -> Newest | None:
        """The one of the highest sequence; None when that doesn't tell which is the newest on the line, or names changed."""
        heads = self.known.heads()
        if len(heads) != 1 or not heads[0].own or not heads[0].on_line or self.known.odd:
            return None
        head, mark = heads[0], self._marks.get(heads[0].name) if heads[0].verified else None
        if not _token(head) or head.sequence is None or not self.folder.told:
            return None
        if not self.folder.are_known(self.known.entries) or not self.folder.told:
            return None
        return Newest(name=head.name, sequence=head.sequence, token=_token(head), mark=mark)

    def _read(self, series: Series, *, marks_as_read: bool = False) -> None:
        """Take over what was read from disk; of what is ours and what is verified, we know more.

        marks_as_read: Of what is verified we know the same: what it counts as is so, and needs no second look.
        """
        self._moved |= list_run(self.run_dir).moved
        self.touched = None
        before = dict(self.known.entries)
        self._series, self._new_sequences, self._behind = series, set(), False
        there = {entry.name for entry in series.entries}
        self.failed = {name: fault for name, fault in self.failed.items() if name in there}
        entries = _in_order([_with_index(entry, before.get(entry.name)) for entry in series.entries])
        known = ((marks_as_read and e.verified) or self._is_marked(e) for e in entries)
        self._set([replace(e, own=self._is_own(e), verified=v) for e, v in zip(entries, known, strict=True)])

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
        line = line_of(own, self._series.decisions.forks, self._moved, unreadable)
        placed = []
        for entry in ordered:
            on_line = entry.index.sequence in line if entry.own and entry.index is not None else entry.on_line
            placed.append(entry if entry.on_line is on_line else replace(entry, on_line=on_line))
        self._series = replace(self.series, entries=tuple(placed), line=line)
        self.left |= self.names - {entry.name for entry in placed}
        self.known = Known(placed, self.failed)


def _token(entry: Entry) -> str:
    return token_of(entry.name, entry.identity) if entry.index is not None and entry.identity else ""


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
