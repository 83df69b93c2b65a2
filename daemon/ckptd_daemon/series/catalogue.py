"""One run as the daemon serves it: where the next snapshot goes, what is proved, what is moved, what may go.

Used by the one thread that changes the disk, under the root's lock.

What must be true:
- A start removes nothing, whatever became of the run's index: retention needs a checkpoint committed since.
- Only what provably belongs to the run is moved or removed, and never the last one of the line: a run with
  only a corrupt checkpoint must say so, and not look like one that never began.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ckptd.disk import durable
from ckptd.disk.commit import Committed, Position
from ckptd.disk.decisions import settle, write_birth
from ckptd.disk.entry import folder_identity
from ckptd.disk.in_quarantine import count_quarantined
from ckptd.disk.newest_file import note_newest
from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import Entry, position_after
from ckptd.disk.staged_line import Accepted, is_overtaken
from ckptd.disk.verification import Report
from ckptd.errors import ReadFailed, SaveFailed
from ckptd.names import parse_step_folder, step_folder
from ckptd.snapshot.descriptor import Descriptor
from ckptd_daemon.series.arrivals import Arrivals
from ckptd_daemon.series.index_file import IndexFile
from ckptd_daemon.series.name_watch import NameWatch
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.pruning import Removed, prune
from ckptd_daemon.series.quarantine import quarantine
from ckptd_daemon.series.run_folder import RunFolder
from ckptd_daemon.series.run_view import RunView
from ckptd_daemon.series.trash import Trash

log = logging.getLogger(__name__)


class Catalogue:
    """One run. Call `open` first.

    Args:
        root: The root, its lock held.
        run: The run's name.
        now: A monotonic clock in seconds.
        watch: Tells what others do to the names in the run's folder. None: it is listed each time.
    """

    def __init__(
        self, root: Root, run: str, now: Callable[[], float] = time.monotonic, watch: NameWatch | None = None
    ) -> None:
        self.run = run
        self.run_dir: Path = root.run_dir(run)
        self._root, self._watch = root, watch
        self._view: RunView
        self._index_file: IndexFile
        self._trash = Trash(self.run_dir)
        self._committed = False  # anything, since the start
        self._folder: RunFolder
        self._arrivals = Arrivals(now)

    def __repr__(self) -> str:
        return f"<Catalogue {self.run_dir} next {self.highest_sequence + 1}>"

    def open(self) -> list[str]:
        """Read the run, give it its birth if it has none, and look at every checkpoint's health.

        Returns:
            What is wrong, one line each. Hashes are the verifier's to read; see `unverified`.

        Raises:
            OSError: The run can't be read, or its birth not be recorded durably.
            ReadFailed: Nor can what says whose it is.
        """
        return self._open("")

    def _open(self, run_id: str) -> list[str]:
        durable.make_real_dir(self.run_dir)
        folder = RunFolder(self.run_dir)
        view = RunView(self._root, self.run, self._watch)
        decisions = view.series.decisions
        _refuse_unread(view)
        if run_id and view.run_id not in ("", run_id):
            raise SaveFailed(
                "another run's folder is in this one's place", where=str(self.run_dir), seen=view.run_id,
                wanted=run_id, todo="put the run's folder back; or stop the daemon and go on with that run",
            )  # fmt: skip
        if decisions.birth_run_id is None:
            view.named(view.run_id or run_id or secrets.token_hex(16))
            if not decisions.unreadable:  # else its birth may be the one that can't be read
                write_birth(self.run_dir, view.run_id)
                view.read_decisions()
        else:
            settle(self.run_dir)
        self._view, self._index_file, self._folder = view, IndexFile(self.run_dir, view), folder
        for entry in view.series.entries:
            self._arrivals.found(entry, marked=view.was_verified(entry))
        return list(self._problems())

    @property
    def run_id(self) -> str:
        """The run's id, 32 hex digits."""
        return self._view.run_id

    @property
    def highest_sequence(self) -> int:
        """The highest ever seen in this run's folder; slots may hold higher ones."""
        return self._view.next_sequence - 1

    @property
    def listed(self) -> int:
        """How many names the last look at the run went through."""
        return self._view.folder.listed

    # --- commits ----------------------------------------------------------------------------------

    def position_for(self, descriptor: Descriptor, sequence: int) -> Position:
        """Where this snapshot goes in the run, as `sequence`.

        Raises:
            SaveFailed: It can't be told, because of checkpoints that can't be read now; or the run's folder is
                another one's now.
        """
        if self._folder.is_lost():  # the same run begins anew, its birth included
            self._committed = False
            self._view.folder.stop()
            self._open(self.run_id)
        if self._view.in_doubt():
            with contextlib.suppress(OSError):  # then nothing more is known than before
                self._view.rescan()
        self._view.read_decisions()
        if self._view[step_folder(descriptor.step)] is not None:
            self._index_file.forget()  # somebody may have removed that folder, and the name be given again
        position = self._view.going_on(descriptor, sequence) or position_after(
            self._view.series, descriptor, sequence, run_id=self.run_id
        )
        return replace(position, repeat=self._view.free_repeat(descriptor.step))

    def added(self, committed: Committed) -> None:
        """The snapshot is durable."""
        self._committed = True
        step, repeat = parse_step_folder(committed.name) or (committed.index.step, 1)
        entry = Entry(
            name=committed.name, path=committed.path, step=step, repeat=repeat, index=committed.index,
            status="committed", own=True, identity=_identity(committed.path),
        )  # fmt: skip
        self._view.read_decisions()  # it may have begun a line
        self._view.put(entry)
        self._arrivals.whole(entry)

    def find(self, client_id: str, snapshot: int) -> Entry | None:
        """The checkpoint that this snapshot became, if it is here and seems whole."""
        return self._view.known.find(client_id, snapshot)

    def is_overtaken(self, descriptor: Descriptor, sequence: int) -> bool:
        """Whether a newer snapshot of its client is here, with a lower sequence."""
        if self._view.is_newer_than_all(descriptor, sequence):
            return False
        return is_overtaken(self._view.series, Accepted(sequence, descriptor))

    def rescan(self) -> list[str]:
        """See what others added or removed; the names that are new."""
        return self._view.rescan()

    # --- proof ------------------------------------------------------------------------------------

    def unverified(self) -> list[str]:
        """What hasn't been checked yet, newest first."""
        entries = reversed(self._view.series.entries)
        failed = self._view.failed
        return [e.name for e in entries if e.index is not None and not e.verified and e.name not in failed]

    def apply_report(self, report: Report) -> str:
        """Act on what the verifier found: mark it, or move it to quarantine when it is corrupt and ours.

        Returns:
            "verified", "corrupt" or "gone".

        Raises:
            ReadFailed, OSError: It can't be told now. Nothing was changed.
        """
        if not report.ok or not _identity(self.run_dir / report.name):
            self.rescan()
        entry = None if report.gone else self._reported(report)
        if entry is None:
            if (seen := self._view[report.name]) is not None and seen.status == "unreadable":
                raise ReadFailed(seen.reason, where=str(seen.path), errno=seen.error)
            return "gone"
        if not report.ok:
            self._condemn(entry, report)
            return "corrupt"
        self._view.mark(entry, report)
        self._arrivals.whole(entry)
        log.info(
            "checkpoint.verified run=%s name=%s bytes=%d how=%s",
            self.run,
            entry.name,
            report.bytes,
            report.how,
        )  # fmt: skip
        return "verified"

    @property
    def holds_back(self) -> bool:
        """Whether something failed its check that isn't moved yet, because it may still be being copied."""
        return any(map(self._is_held, self._view.failed))

    def write_index(self) -> None:
        """Write the run's index, a cache.

        Raises:
            OSError: The old one is untouched; nothing depends on it.
        """
        self._index_file.write(self._view)

    def note_newest(self) -> None:
        """Note which checkpoint is the newest, so that nobody has to list the run for it. For a moment of rest: what
        changed within the last milliseconds keeps it from being noted."""
        with contextlib.suppress(OSError):  # then whoever asks lists the run
            note_newest(self.run_dir, self._view.newest)

    # --- retention --------------------------------------------------------------------------------

    def apply_retention(self, policy: RetentionPolicy) -> list[Removed]:
        """Remove what the policy doesn't keep, if anything was committed since the start.

        What can't be removed is warned of and tried again the next time.
        """
        self.rescan()
        self._arrivals.left(self._view.left)
        self._view.left = set()
        self._view.read_decisions()
        self._retry_quarantine()
        return prune(self._view, policy, self._trash, before=self._record_marks) if self._committed else []

    def summary(self) -> dict[str, Any]:
        """For `ckptd status`: counts, the newest committed and the newest verified one, what is wrong."""
        known, failed = self._view.known, self._view.failed
        newest_first = reversed(known.entries.values())
        line = (
            e for e in newest_first if e.own and e.on_line and e.index is not None and e.name not in failed
        )
        committed = next(line, None)
        verified = next(
            (entry for entry in chain([committed], line) if entry is None or entry.verified), None
        )
        return {
            "run": self.run, "run_id": self.run_id, "checkpoints": len(known.entries),
            "verified": known.verified,
            "bytes": known.bytes,
            "quarantined": count_quarantined(self.run_dir),
            "last_committed": _brief(committed),
            "last_verified": _brief(verified),
            "problems": list(self._problems()),
        }  # fmt: skip

    # --- inside -----------------------------------------------------------------------------------

    def _record_marks(self) -> None:
        """Before a checkpoint goes, the index must say which verified one stays: who asks without waiting
        would be told that nothing is verified."""
        try:
            self.write_index()
        except OSError as error:
            log.warning("index.not_written run=%s error=%s", self.run, error)

    def _problems(self) -> Iterator[str]:
        failed, known = self._view.failed, self._view.known
        names = dict.fromkeys((*known.odd, *(name for name in failed if name in known.entries)))
        for entry in map(known.entries.__getitem__, names):
            if fault := failed.get(entry.name):
                yield f"{entry.name} is corrupt: {fault}"
            elif entry.status != "committed":
                yield f"{entry.name} is {entry.status}: {entry.reason}"
            elif not entry.own:
                yield f"{entry.name} is of another run: usable once verified, never removed"
        for reason in self._view.unreadable_decisions():
            yield f"a decision can't be read, so nothing is removed: {reason}"

    def _reported(self, report: Report) -> Entry | None:
        """The entry that the report is about; None when what is there now is another thing."""

        def fits(entry: Entry | None) -> bool:
            if entry is None or (report.ok and entry.status not in ("committed", "unreadable")):
                return False
            if entry.index is None and entry.status == "corrupt" and not report.ok:
                return True
            seen = entry.index.index_sha256 if entry.index is not None else ""
            return report.index_sha256 == seen

        entry = self._view[report.name]
        if not fits(entry):  # not our doing: look again
            self._view.rescan(always=True)
            entry = self._view[report.name]
        return entry if fits(entry) else None

    def _condemn(self, entry: Entry, report: Report) -> None:
        first = report.faults[0] if report.faults else "its check failed"
        more = f" (and {len(report.faults) - 1} more faults)" if len(report.faults) > 1 else ""
        self._view.fail(entry.name, first, report)
        self._arrivals.failed(entry, report.stat_signature)
        log.error(
            "checkpoint.corrupt run=%s name=%s %s%s; %s",
            self.run, entry.name, first, more, self._next_valid(entry),
        )  # fmt: skip
        self._move_away(entry)
        if self._is_held(entry.name):
            log.warning("checkpoint.left_alone run=%s name=%s it was put there by somebody, who may still be copying it",
                        self.run, entry.name)  # fmt: skip

    def _next_valid(self, entry: Entry) -> str:
        before = [e for e in self._view.series.entries if e.own and e.on_line and e.verified]
        if entry.sequence is not None:
            before = [e for e in before if (e.sequence or 0) < entry.sequence]
        if not before:
            return "no valid one before it is left"
        return f"step {before[-1].step} ({before[-1].name}) is the newest valid one before it"

    def _move_away(self, entry: Entry) -> None:
        """To quarantine, if it is ours, as it was when it failed, and not the last one of the line."""
        rest = [
            e for e in self._view.series.entries if e.own and e.on_line and e.name not in self._view.failed
        ]
        if not entry.own or entry.sequence is None or not rest or not self._view.still_failed(entry.name):
            return
        if self._is_held(entry.name):
            return
        try:
            target = quarantine(entry.path, self.run_id)
        except OSError as error:
            log.warning(
                "checkpoint.not_moved run=%s name=%s %s; tried again later", self.run, entry.name, error
            )
            return
        if target is not None:
            self._view.drop([entry.name], moved=entry.sequence)
            log.warning("checkpoint.quarantined run=%s name=%s to=%s", self.run, entry.name, target)

    def _is_held(self, name: str) -> bool:
        entry = self._view[name]
        return entry is not None and entry.own and not self._arrivals.may_move(entry)

    def _retry_quarantine(self) -> None:
        for name in tuple(self._view.failed):
            if (entry := self._view[name]) is not None:
                self._move_away(entry)


def _refuse_unread(view: RunView) -> None:
    """A run that seems to have no birth, or a lower sequence than it has, because it can't be read now must
    get no second one."""
    series = view.series
    unplaced = any(e.is_in_doubt and e.index is None and e.hint is None for e in series.entries)
    unborn = series.decisions.birth_run_id is None and (series.decisions.errors or view.in_doubt())
    if unplaced or unborn:
        said = [*view.unreadable_decisions(), *view.in_doubt()]
        raise ReadFailed(
            "the run can't be told now: whose it is, or what was its last", where=str(view.run_dir), seen=said[0],
            todo="it is tried again once the disk can be read; else move that away",
        )  # fmt: skip


def _identity(path: Path) -> str:
    try:
        return folder_identity(path.lstat())
    except OSError:
        return ""  # known to nobody: it is read where another would be looked up


def _brief(entry: Entry | None) -> dict[str, Any] | None:
    """It in short."""
    return None if entry is None else {"name": entry.name, "step": entry.step, "sequence": entry.sequence}
