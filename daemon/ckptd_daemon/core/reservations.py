"""Requests for slots: what a client has, what it asks for, and making the difference without blocking."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptd.disk.save_error import save_error
from ckptd.errors import CkptdError, InvalidArgument, OverBudget, SharedMemoryTooSmall
from ckptd.limits import MAX_SLOTS_PER_CLIENT
from ckptd.link import wire
from ckptd.snapshot.sizes import show_slots
from ckptd.snapshot.slot_layout import page_up
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_daemon.core.sessions import Session
from ckptd_daemon.core.slotpool import SlotPool, header_of, holds_snapshot
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.core.worker import Worker

log = logging.getLogger(__name__)

#: Slots of one client at any time: while its state grows, the old ones are still being written.
MAX_SLOTS_MEANWHILE: Final = 2 * MAX_SLOTS_PER_CLIENT
#: A reservation may be sent again while it is under way, this often.
MAX_WAITING: Final = 16

#: Sends to a connection; False when that is gone.
Send = Callable[[bytes, wire.Reply], bool]


@dataclass
class Reservation:
    """A request that can't be answered yet."""

    slot_bytes: int
    slots: int
    waiting: list[tuple[bytes, int]] = field(default_factory=list)  #: (identity, message id) to answer
    making: bool = False


class Reservations:
    """At most one reservation per client at a time.

    Args:
        pool: The slots.
        maker: The thread that makes them.
        send: Sends a message to a connection.
        present: The session of a client, if it is there.
        staged: Counts what clients have, and what is being made for them.
    """

    def __init__(
        self, pool: SlotPool, maker: Worker, send: Send, present: Callable[[str], Session | None],
        staged: StagedBytes,
    ) -> None:  # fmt: skip
        self._pool, self._maker, self._send, self._present = pool, maker, send, present
        self._staged = staged
        self._under_way: dict[str, Reservation] = {}
        self._granted: dict[str, int] = {}  # client → bytes of each slot it was given last
        self._being_made: dict[str, int] = {}
        staged.count_also(lambda: self._being_made.items())

    def ask(self, session: Session, identity: bytes, request: wire.Reserve) -> None:
        """Answer now, or once the slots are made, or once there is room for them.

        A newer request replaces one that is under way.
        """
        reservation = self._under_way.get(session.client_id)
        if reservation is None:
            reservation = Reservation(request.slot_bytes, request.slots)
            self._under_way[session.client_id] = reservation
        same = (reservation.slot_bytes, reservation.slots) == (request.slot_bytes, request.slots)
        if not same or len(reservation.waiting) >= MAX_WAITING:
            self._refuse_waiting(reservation, InvalidArgument("a newer reservation has replaced this one"))
            reservation.slot_bytes, reservation.slots = request.slot_bytes, request.slots
        reservation.waiting.append((identity, request.id))
        self.go_on(session)

    def go_on(self, session: Session) -> None:
        """A slot was freed, or a reservation has come: see what can be done now."""
        reservation = self._under_way.get(session.client_id)
        if reservation is None or reservation.making:
            return
        missing = self._make_way(session, reservation)
        if missing <= 0:
            self._finish(session, None)
        elif len(self._pool.of(session.client_id)) + missing <= MAX_SLOTS_MEANWHILE:
            self._make_within_budget(session, reservation, missing)
        elif not self._in_flight(session):
            todo = "release the slots that are being filled"
            self._finish(session, InvalidArgument("too many slots", where=f"run {session.run}", todo=todo))

    def any_under_way(self) -> bool:
        """Whether somebody waits for slots."""
        return bool(self._under_way)

    def room_came(self) -> None:
        """A slot was freed: whose it was may wait for it, and others when it is gone."""
        for session in [self._present(client_id) for client_id in self._under_way]:
            if session is not None:
                self.go_on(session)

    def forget(self, session: Session) -> None:
        """The client is gone; what is being made for it is removed when it is done."""
        self._under_way.pop(session.client_id, None)
        self._granted.pop(session.client_id, None)

    def has_outgrown(self, session: Session, slot: Slot) -> bool:
        """Whether the client was given larger slots, and this one is left from before."""
        return slot.capacity < self._granted.get(session.client_id, 0)

    def infos(self, session: Session) -> list[wire.SlotInfo]:
        """All slots of the client, as messages carry them."""
        slots = self._pool.of(session.client_id)
        return [wire.SlotInfo(name=slot.name, bytes=slot.capacity) for slot in slots]

    def _make_way(self, session: Session, reservation: Reservation) -> int:
        """Remove free slots that are too small or too many; returns how many are missing."""
        missing = reservation.slots
        for slot in self._pool.of(session.client_id):
            header, there = header_of(slot), slot.in_place()
            if header is not None and there and slot.capacity >= reservation.slot_bytes and missing > 0:
                missing -= 1
            elif header is None or header.state is SlotState.FREE:
                self._pool.remove(slot)
        return missing

    def _in_flight(self, session: Session) -> bool:
        return any(_holds_snapshot(slot) for slot in self._pool.of(session.client_id))

    def _room_comes(self, session: Session) -> bool:
        """Whether memory is given back by itself: by what this client or a dead one has on its way to the disk."""
        return any(
            _holds_snapshot(slot)
            for client_id, slot in self._pool.owned()
            if client_id == session.client_id or self._present(client_id) is None
        )

    def _make_within_budget(self, session: Session, reservation: Reservation, missing: int) -> None:
        size = page_up(reservation.slot_bytes)
        asked = f"{show_slots(missing, size)} for run {session.run}"
        try:
            self._staged.check(session.client_id, asked, missing * size)
        except OverBudget as error:
            if not self._room_comes(session):
                self._finish(session, error)
            return
        log.info("slots.making run=%s what=%r bytes=%d where=%s",
                 session.run, show_slots(missing, size), missing * size, self._pool.folder)  # fmt: skip
        self._make(session, reservation, missing)

    def _make(self, session: Session, reservation: Reservation, missing: int) -> None:
        reservation.making = True
        client_id, run, owner = session.client_id, session.run, session.owner
        # As it was held against the budget: a newer request may change the reservation meanwhile.
        size = reservation.slot_bytes
        self._being_made[client_id] = missing * page_up(size)
        self._maker.submit(
            lambda: self._pool.make(client_id, run, owner, missing, size),
            lambda made: self._made(session, reservation, made),
        )

    def _made(self, session: Session, reservation: Reservation, made: list[Slot] | Exception) -> None:
        reservation.making = False
        self._being_made.pop(session.client_id, None)
        if isinstance(made, Exception):
            if not self._is_there(session):
                return
            if isinstance(made, SharedMemoryTooSmall) and self._room_comes(session):
                return
            self._finish(session, save_error(made, "the slots can't be made", self._pool.folder))
        elif not self._is_there(session):
            self._pool.discard(made)
        else:
            self._pool.add(session.client_id, made)
            log.info("slots.made run=%s count=%d bytes=%d", session.run, len(made), made[0].capacity)
            self.go_on(session)

    def _is_there(self, session: Session) -> bool:
        return self._present(session.client_id) is session

    def _finish(self, session: Session, error: CkptdError | None) -> None:
        reservation = self._under_way.pop(session.client_id, None)
        if reservation is None:
            return
        if error is not None:
            self._refuse_waiting(reservation, error)
            return
        self._granted[session.client_id] = reservation.slot_bytes
        infos = self.infos(session)
        for identity, message_id in reservation.waiting:
            self._send(identity, wire.Reserved(id=message_id, slots=infos))

    def _refuse_waiting(self, reservation: Reservation, error: CkptdError) -> None:
        waiting, reservation.waiting = reservation.waiting, []
        for identity, message_id in waiting:
            self._send(identity, wire.Refused(id=message_id, error=wire.WireError.of(error)))


def _holds_snapshot(slot: Slot) -> bool:
    header = header_of(slot)
    return header is not None and holds_snapshot(header)
