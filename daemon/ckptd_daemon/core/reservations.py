"""Requests for slots: what a client has, what it asks for, and making the difference without blocking."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptd.errors import CkptdError, InvalidArgument, SharedMemoryTooSmall
from ckptd.limits import MAX_SLOTS_PER_CLIENT
from ckptd.link import wire
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_daemon.core.sessions import Session
from ckptd_daemon.core.slotpool import SlotPool, header_of, holds_snapshot
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
        present: Whether a session is still there.
    """

    def __init__(self, pool: SlotPool, maker: Worker, send: Send, present: Callable[[Session], bool]) -> None:
        self._pool, self._maker, self._send, self._present = pool, maker, send, present
        self._under_way: dict[str, Reservation] = {}

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
        """One of the client's slots was freed, or a reservation has come: see what can be done now."""
        reservation = self._under_way.get(session.client_id)
        if reservation is None or reservation.making:
            return
        missing = self._make_way(session, reservation)
        if missing <= 0:
            self._finish(session, None)
        elif len(self._pool.of(session.client_id)) + missing <= MAX_SLOTS_MEANWHILE:
            self._make(session, reservation, missing)
        elif not self._in_flight(session):
            todo = "release the slots that are being filled"
            self._finish(session, InvalidArgument("too many slots", where=f"run {session.run}", todo=todo))

    def forget(self, session: Session) -> None:
        """The client is gone; what is being made for it is removed when it is done."""
        self._under_way.pop(session.client_id, None)

    def infos(self, session: Session) -> list[wire.SlotInfo]:
        """All slots of the client, as messages carry them."""
        slots = self._pool.of(session.client_id)
        return [wire.SlotInfo(name=slot.name, bytes=slot.capacity) for slot in slots]

    def _make_way(self, session: Session, reservation: Reservation) -> int:
        """Remove free slots that are too small or too many; returns how many are missing."""
        missing = reservation.slots
        for slot in self._pool.of(session.client_id):
            header = header_of(slot)
            if header is not None and slot.capacity >= reservation.slot_bytes and missing > 0:
                missing -= 1
            elif header is None or header.state is SlotState.FREE:
                self._pool.remove(slot)
        return missing

    def _in_flight(self, session: Session) -> bool:
        headers = [header_of(slot) for slot in self._pool.of(session.client_id)]
        return any(header is not None and holds_snapshot(header) for header in headers)

    def _make(self, session: Session, reservation: Reservation, missing: int) -> None:
        reservation.making = True
        client_id, run, owner = session.client_id, session.run, session.owner
        self._maker.submit(
            lambda: self._pool.make(client_id, run, owner, missing, reservation.slot_bytes),
            lambda made: self._made(session, reservation, made),
        )

    def _made(self, session: Session, reservation: Reservation, made: list[Slot] | Exception) -> None:
        reservation.making = False
        if isinstance(made, Exception):
            if not self._present(session):
                return
            if isinstance(made, SharedMemoryTooSmall) and self._in_flight(session):
                return  # there will be room when what is being written has left its slot
            self._finish(session, _as_ours(made))
        elif not self._present(session):
            self._pool.discard(made)
        else:
            self._pool.add(session.client_id, made)
            log.info("slots.made run=%s count=%d bytes=%d", session.run, len(made), made[0].capacity)
            self.go_on(session)

    def _finish(self, session: Session, error: CkptdError | None) -> None:
        reservation = self._under_way.pop(session.client_id, None)
        if reservation is None:
            return
        if error is not None:
            self._refuse_waiting(reservation, error)
            return
        infos = self.infos(session)
        for identity, message_id in reservation.waiting:
            self._send(identity, wire.Reserved(id=message_id, slots=infos))

    def _refuse_waiting(self, reservation: Reservation, error: CkptdError) -> None:
        waiting, reservation.waiting = reservation.waiting, []
        for identity, message_id in waiting:
            self._send(identity, wire.Refused(id=message_id, error=wire.WireError.of(error)))


def _as_ours(error: Exception) -> CkptdError:
    if isinstance(error, CkptdError):
        return error
    return CkptdError("the slots can't be made", seen=str(error) or type(error).__name__)
