"""The way of every snapshot from its acceptance to its verification, and who is told of each step."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from ckptd.disk.verification import Report
from ckptd.errors import CkptdError, NoSpace, ProtocolError
from ckptd.names import parse_step_folder
from ckptd.snapshot.slots import Slot, SlotHeader
from ckptd_daemon.core.book import Book
from ckptd_daemon.core.disk import Disk, Judged, Overtaken, RunFacts, Written
from ckptd_daemon.core.faults import HOPELESS, as_ours, fault
from ckptd_daemon.core.lifecycle import Event, State
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.waiting import WaitingList

log = logging.getLogger(__name__)

RETRY_FIRST_S: Final = 5.0
RETRY_MOST_S: Final = 60.0
ROOM_WAIT_S: Final = 10.0  #: for retention to free room; less when a verdict comes sooner
MOST_ROOM_WAITS: Final = 2
TIDY_EVERY_S: Final = 10.0
_EVENTS: Final = {"verified": Event.PROVED, "corrupt": Event.FAULT_FOUND, "gone": Event.VANISHED}


class Listener(Protocol):
    """Whoever the pipeline tells."""

    def snapshot_changed(self, snapshot: Snapshot, freed: Slot | None) -> None:
        """Its state changed; `freed` is the slot that may be filled again."""

    def attached(self, client_id: str) -> bool:
        """Whether that client lives and is connected: a failure can be told to it."""

    def to_verify(self, run: str, name: str) -> None:
        """This checkpoint shall be re-read from the medium."""


class Pipeline:
    """All runs' snapshots. Of the loop's thread only.

    Args:
        disk: Does the writing.
        pool: The slots.
        listener: Is told.
        now: A monotonic clock in seconds.
    """

    def __init__(self, disk: Disk, pool: SlotPool, listener: Listener, now: Callable[[], float]) -> None:
        self._disk, self._pool, self._listener, self._now = disk, pool, listener, now
        self.books: dict[str, Book] = {}
        self._waiting = WaitingList()
        self._tidy_at = now() + TIDY_EVERY_S
        self._verify_later: list[tuple[float, str, str]] = []  # when, run, name

    # --- runs ------------------------------------------------------------------------------------

    def opened(self, run: str, facts: RunFacts) -> Book:
        """Take in a run that the disk has opened."""
        if run not in self.books:
            self.books[run] = Book(facts.run_id, facts.highest_sequence + 1, facts.summary)
            for problem in facts.problems:
                log.warning("run.problem run=%s problem=%s", run, problem)
            for name in facts.unverified:
                self._listener.to_verify(run, name)
        return self.books[run]

    def unwritten(self, run: str | None = None) -> list[Snapshot]:
        """What is staged or being written, of one run or of all."""
        return [s for book in self._books(run) for s in book.ledger.unwritten()]

    def busy(self) -> bool:
        """Whether something is being written or about to be; what was put off for long doesn't count."""
        return any(s.retry_at is None or s.waits_for_room for s in self.unwritten())

    def find(self, run: str, client_id: str, number: int) -> Snapshot | None:
        book = self.books.get(run)
        return book.ledger.get(client_id, number) if book else None

    # --- from slot to disk -----------------------------------------------------------------------

    def accept(self, slot: Slot, header: SlotHeader, *, sequence: int = 0) -> Snapshot:
        """Give a sealed snapshot its sequence, and have it written unless a newer one of its client stands; only once.

        Args:
            slot: What holds it.
            header: Its header; the run is open.
            sequence: The one an earlier daemon gave it, at adoption.
        """
        book = self.books[header.run]
        known = book.ledger.get(header.client_id, header.snapshot)
        if known is not None:
            return known
        late = book.ledger.is_overtaken(header.client_id, header.snapshot, sequence)
        given = book.take_sequence(0 if late else sequence)
        snapshot = Snapshot(header.run, header.client_id, header.snapshot, given, slot)
        slot.accept(snapshot.sequence)
        book.ledger.add(snapshot)
        if late:
            self._give_up(snapshot, Event.REPLACED_BY_NEWER)
        else:
            self._queue(snapshot, slot)
        return snapshot

    def remember(
        self, run: str, client_id: str, number: int, name: str, sequence: int, *, verified: bool
    ) -> Snapshot:
        """Take in a snapshot that an earlier daemon committed."""
        step = (parse_step_folder(name) or (0, 0))[0]
        snapshot = Snapshot(run, client_id, number, sequence, None, State.COMMITTED, step, name)
        if verified:
            snapshot.becomes(Event.PROVED)
        self.books[run].ledger.add(snapshot)
        return snapshot

    def retry(self) -> None:
        """Do again what was put off and is due."""
        for snapshot in self.unwritten():
            if (
                snapshot.retry_at is not None
                and snapshot.slot is not None
                and self._now() >= snapshot.retry_at
            ):
                snapshot.retry_at, snapshot.waits_for_room = None, False
                self._queue(snapshot, snapshot.slot)
        if self._now() >= self._tidy_at:
            self._tidy_at = self._now() + TIDY_EVERY_S
            self._disk.tidy()
        self._disk.catch_up()
        due = [later for later in self._verify_later if self._now() >= later[0]]
        for later in due:
            self._verify_later.remove(later)
            self._listener.to_verify(later[1], later[2])

    def give_way(self, snapshot: Snapshot, step: int = 0, *, until: float = math.inf) -> bool:
        """Give a snapshot's slot up for a newer one of its client; False when it is being written, or settled.

        Whether it is being written is decided by who takes its job first: this thread or the disk's.

        Args:
            snapshot: Which.
            step: Its step as its client says, for what is told of it: its descriptor wasn't read.
            until: Later nothing is changed: whoever asked waits for it no more.
        """
        if snapshot.state is not State.STAGED or not self._now() <= until:
            return False
        if snapshot.retry_at is None and not self._disk.withdraw(snapshot.job):
            return False
        snapshot.step = snapshot.step or step
        self._give_up(snapshot, Event.REPLACED_BY_NEWER)
        self._waiting.answer()
        return True

    def _queue(self, snapshot: Snapshot, slot: Slot) -> None:
        ended = False

        def write() -> Written | Overtaken:
            nonlocal ended
            try:
                return self._disk.write(slot, snapshot.sequence, started)
            finally:
                ended = True

        def started(step: int) -> None:
            snapshot.step = step
            snapshot.becomes(Event.WRITE_STARTED)
            # Else what came of it is told next, and whoever waits for that waits for no word of this.
            if not ended:
                self._listener.snapshot_changed(snapshot, None)

        snapshot.job = self._disk.submit(write, lambda result: self._wrote(snapshot, slot, result))

    def _wrote(self, snapshot: Snapshot, slot: Slot, result: Written | Overtaken | Exception) -> None:
        if isinstance(result, Overtaken):
            snapshot.step = result.step
            self._give_up(snapshot, Event.REPLACED_BY_NEWER)
        elif isinstance(result, Written):
            self._committed(snapshot, slot, result)
        else:
            self._not_committed(snapshot, slot, as_ours(result))
        self._waiting.answer()

    def _committed(self, snapshot: Snapshot, slot: Slot, written: Written) -> None:
        book = self.books[snapshot.run]
        snapshot.becomes(Event.FOLDER_RENAMED)
        snapshot.name, snapshot.step, snapshot.slot, snapshot.error = written.name, written.step, None, None
        snapshot.nbytes, snapshot.seconds = written.nbytes, written.seconds
        book.last_committed = snapshot
        self._listener.snapshot_changed(snapshot, slot)
        for older in book.ledger.unwritten():
            if older.retry_at is not None and older.sequence < snapshot.sequence:
                self._give_up(older, Event.REPLACED_BY_NEWER)
        run = snapshot.run
        self._listener.to_verify(run, snapshot.name)
        self._disk.submit(lambda: self._disk.sum_up(run), lambda result: self._summed_up(run, result))

    def _not_committed(self, snapshot: Snapshot, slot: Slot, error: CkptdError) -> None:
        if snapshot.state is State.STAGED:  # it failed before its step was known
            snapshot.becomes(Event.WRITE_STARTED)
        snapshot.error = error
        hopeless = isinstance(error, HOPELESS)
        if isinstance(error, NoSpace) and self._room_may_come(snapshot):
            self._wait_for_room(snapshot)
            return
        told = self._listener.attached(snapshot.client_id)
        log.warning(
            "snapshot.%s run=%s step=%d sequence=%d error=%s", "failed" if hopeless or told else "put_off",
            snapshot.run, snapshot.step, snapshot.sequence, error,
        )  # fmt: skip
        if hopeless or told:
            book = self.books[snapshot.run]
            book.failed, book.last_failed = book.failed + 1, snapshot
            self._give_up(snapshot, Event.WRITE_FAILED)
            return
        # Nobody is there to save a newer one in its place, so it stays in its slot until there is.
        snapshot.becomes(Event.WRITE_POSTPONED)
        snapshot.retry_s = min(RETRY_MOST_S, snapshot.retry_s * 2 or RETRY_FIRST_S)
        snapshot.retry_at = self._now() + snapshot.retry_s

    def _room_may_come(self, snapshot: Snapshot) -> bool:
        """Whether a checkpoint of its run is still to be verified: retention follows, and frees room."""
        pending = any(s.state is State.COMMITTED for s in self.books[snapshot.run].ledger)
        return pending and snapshot.room_waits < MOST_ROOM_WAITS

    def _wait_for_room(self, snapshot: Snapshot) -> None:
        log.warning("snapshot.waits_for_room run=%s step=%d sequence=%d error=%s",
                    snapshot.run, snapshot.step, snapshot.sequence, snapshot.error)  # fmt: skip
        snapshot.becomes(Event.WRITE_POSTPONED)
        snapshot.room_waits += 1
        snapshot.retry_at, snapshot.waits_for_room = self._now() + ROOM_WAIT_S, True

    def _give_up(self, snapshot: Snapshot, event: Event) -> None:
        slot, snapshot.slot, snapshot.retry_at, snapshot.waits_for_room = snapshot.slot, None, None, False
        snapshot.becomes(event)
        if snapshot.state is State.SUPERSEDED:
            book = self.books[snapshot.run]
            book.superseded, book.last_superseded = book.superseded + 1, snapshot
            log.info("snapshot.superseded run=%s step=%d sequence=%d",
                     snapshot.run, snapshot.step, snapshot.sequence)  # fmt: skip
        if slot is not None:
            with contextlib.suppress(ProtocolError):  # its client has destroyed the header
                slot.release()
        self._listener.snapshot_changed(snapshot, slot)

    # --- after the commit ------------------------------------------------------------------------

    def report(self, run: str, report: Report) -> None:
        """Act on what the verifier found."""
        self._disk.submit(
            lambda: self._disk.judge(run, report), lambda result: self._judged(run, report, result)
        )

    def _judged(self, run: str, report: Report, result: Judged | Exception) -> None:
        if isinstance(result, Exception):
            log.error("report.not_applied run=%s name=%s error=%s", run, report.name, result)
            self._verify_later.append((self._now() + RETRY_MOST_S, run, report.name))
            return
        book = self.books.get(run)
        if book is None:
            return
        book.summary = result.summary
        snapshot = book.ledger.named(report.name)
        if snapshot is not None and snapshot.state in (State.COMMITTED, State.VERIFIED):
            before = snapshot.state
            snapshot.becomes(_EVENTS[result.verdict])
            snapshot.error = fault(result.verdict, report)
            if snapshot.state is not before:
                self._listener.snapshot_changed(snapshot, None)
        self._waiting.answer()
        self._make_room(run)  # the last: nobody waits for files to be removed

    def _make_room(self, run: str) -> None:
        """Have retention remove what it may: at once where a snapshot waits for that."""
        waiting = [s for s in self.unwritten(run) if s.waits_for_room]

        def made(result: Mapping[str, Any] | Exception) -> None:
            self._summed_up(run, result)
            for snapshot in waiting:
                if snapshot.waits_for_room:  # what could be removed has been
                    snapshot.retry_at = self._now()

        self._disk.submit(lambda: self._disk.sum_up(run, at_once=bool(waiting)), made)

    def _summed_up(self, run: str, result: Mapping[str, Any] | Exception) -> None:
        if not isinstance(result, Exception):
            self.books[run].summary = result

    # --- waiting ---------------------------------------------------------------------------------

    def when_settled(
        self, run: str | None, *, verified: bool, reply: Callable[[int], object], owner: bytes = b""
    ) -> None:
        """Call reply(how many failed) once all snapshots accepted so far are settled."""
        snapshots = [s for book in self._books(run) for s in book.ledger if not s.settled(verified=verified)]
        failing = [s for s in self.unwritten(run) if s not in snapshots]  # put off: as good as failed for now
        self._waiting.add([*snapshots, *failing], verified=verified, reply=reply, owner=owner)

    def waiting(self, owner: bytes | None = None) -> int:
        """How many requests of this connection wait, or of all."""
        return self._waiting.count(owner)

    def proof_is_waited_for(self) -> bool:
        """Whether a request waits until all is verified."""
        return self._waiting.any_for_proof()

    def _books(self, run: str | None) -> Iterable[Book]:
        return list(self.books.values()) if run is None else [b for r, b in self.books.items() if r == run]
