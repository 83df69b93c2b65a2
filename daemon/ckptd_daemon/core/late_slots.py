"""Slots that couldn't be opened at the start (no descriptor free, no memory): tried again, and adopted late.

Meanwhile the run may have gone on. What was sealed is written unless something newer of its run was committed:
the sequence it would get now is the highest, and an old state must never become the latest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from ckptd.errors import CkptdError
from ckptd.snapshot.slots import Slot, SlotHeader
from ckptd_daemon.core import recovery
from ckptd_daemon.core.book import Book
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.disk import Disk, RunFacts
from ckptd_daemon.core.lifecycle import UNWRITTEN, State
from ckptd_daemon.core.slotpool import SlotPool, adoption_order, header_of, holds_snapshot
from ckptd_daemon.core.snapshots import Snapshot

log = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 10.0


class LateSlots:
    """Looks for them from time to time. Of the loop's thread only; made right after the first adoption.

    Args:
        disk: Opens runs.
        clients: Whose slots they are.
        pool: Where they lie.
        now: A monotonic clock in seconds.
    """

    def __init__(self, disk: Disk, clients: Clients, pool: SlotPool, now: Callable[[], float]) -> None:
        self._disk, self._clients, self._pool, self._now = disk, clients, pool, now
        self._books = clients.pipeline.books
        self._at_start = frozenset(s for book in self._books.values() for s in book.ledger)
        self._next_look = now() + LOOK_AGAIN_S
        self._sealed: dict[str, Slot] = {}  #: by name; to be accepted, or outdated

    def look(self) -> None:
        """Do what can be done now; returns at once when nothing is due."""
        if self._now() < self._next_look or not (self._pool.unread or self._sealed):
            return
        self._next_look = self._now() + LOOK_AGAIN_S
        try:
            found = self._pool.scan()
        except OSError as error:
            log.warning("slots.not_listed folder=%s error=%s", self._pool.folder, error)
            return
        self._sealed |= {slot.name: slot for slot, _ in recovery.sort_out(self._clients, self._pool, found)}
        headers = [(slot, header_of(slot)) for slot in self._sealed.values()]
        held = [(slot, header) for slot, header in headers if header is not None]
        self._sealed = {slot.name: slot for slot, header in adoption_order(held) if self._waits(slot, header)}

    def _waits(self, slot: Slot, header: SlotHeader) -> bool:
        """Accept it or give it up; True when that can't be decided yet."""
        book = self._books.get(header.run)
        if not holds_snapshot(header) or self._pool.get(header.client_id, slot.name) is not slot:
            return False  # somebody else saw to it
        if book is None:
            self._open(header.run)
            return True
        if book.ledger.get(header.client_id, header.snapshot) is not None:
            return False
        newer = [s for s in book.ledger if is_newer(s, header, at_start=s in self._at_start)]
        try:
            if any(s.state in UNWRITTEN for s in newer):
                return True
            if any(s.state in (State.COMMITTED, State.VERIFIED) for s in newer):
                self._give_up(slot, header)
            else:
                self._accept(book, slot, header)
        except CkptdError as error:  # its client lives and has changed it meanwhile
            log.warning("snapshot.not_adopted slot=%s error=%s", slot.name, error)
        return False

    def _accept(self, book: Book, slot: Slot, header: SlotHeader) -> None:
        free = header.sequence >= book.next_sequence  # else it may have been given again since
        snapshot = self._clients.pipeline.accept(slot, header, sequence=header.sequence if free else 0)
        log.info("snapshot.adopted run=%s snapshot=%d sequence=%d slot=%s late=1",
                 header.run, snapshot.number, snapshot.sequence, slot.name)  # fmt: skip

    def _give_up(self, slot: Slot, header: SlotHeader) -> None:
        log.warning("snapshot.superseded run=%s snapshot=%d slot=%s", header.run, header.snapshot, slot.name)
        slot.release()
        if self._clients.sessions.get(header.client_id) is None:
            self._pool.remove(slot)

    def _open(self, run: str) -> None:
        def opened(facts: RunFacts | Exception) -> None:
            if isinstance(facts, Exception):
                log.error("run.not_opened run=%s error=%s", run, facts)
            else:
                self._clients.pipeline.opened(run, facts)

        self._disk.submit(lambda: self._disk.open_run(run), opened)


def is_newer(snapshot: Snapshot, late: SlotHeader, *, at_start: bool) -> bool:
    """Whether a snapshot of the same run was taken after the one that `late` describes.

    Args:
        snapshot: The one that was accepted.
        late: The one that lay in a slot nobody could open.
        at_start: The first was adopted too, at the start; else it was taken since.
    """
    if snapshot.client_id == late.client_id:
        return snapshot.number > late.snapshot
    # Of two dead clients the one whose snapshot had no sequence yet was the last.
    return not at_start or (late.sequence != 0 and snapshot.sequence > late.sequence)
