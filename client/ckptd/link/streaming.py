"""Streaming for one client: whether it streams, from which memory, and what became of it. Of the client's thread."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Final

from ckptd.disk.rootdir import Root
from ckptd.errors import CkptdError
from ckptd.link.client_options import Transport
from ckptd.link.private_slots import PrivateSlots
from ckptd.link.session import Session
from ckptd.link.staging import Staged
from ckptd.link.stream_job import Failed, Place
from ckptd.link.stream_sender import StreamSender
from ckptd.link.wire import Accepted
from ckptd.snapshot.slots import SlotState

__all__ = ["Streaming"]

log = logging.getLogger(__name__)

_WHAT: Final = (
    "snapshots are staged in this process's memory and streamed to the daemon over ZeroMQ; what isn't streamed yet "
    "is lost with this process"
)


class Streaming:
    """Not safe for use by several threads at once.

    Args:
        root: The root.
        owner: (client id, run).
        slots: How many snapshots may be under way.
        transport: "stream" streams from the start, "shm" never, "auto" from when instead_of_slots() is called.

    Attributes:
        on: Whether it streams. It goes on doing so until the client is closed.
        slots: The memory.
    """

    def __init__(self, root: Root, owner: tuple[str, str], slots: int, transport: Transport) -> None:
        self.on = transport == "stream"
        self.slots = PrivateSlots(*owner, slots)
        self._allowed, self._run = transport != "shm", owner[1]
        self._sender = StreamSender(root, owner[0], slots)

    def instead_of_slots(self, why: CkptdError) -> None:
        """Stream from now on, and say why. Raises `why` where streaming isn't allowed."""
        if not self._allowed:
            raise why
        self.on = True
        log.warning("transport.stream run=%s %s; because: %s", self._run, _WHAT, why)

    def go_to(self, session: Session, unheard: Iterable[int] = ()) -> None:
        """Stream to the daemon that the session is attached to: first what it may have to be sent again."""
        route, attached, record = session.route, session.attached, session.record
        if route is not None and attached is not None and record is not None:
            self._sender.go_to(Place(record, route, attached), unheard)

    def send(self, staged: Staged) -> None:
        """Have a sealed slot of ours streamed, unless it is already."""
        self._sender.send(staged.ticket.snapshot, staged.generation, staged.slot)

    def expect(self, snapshot: int) -> None:
        """Stream nothing later before this one is heard of."""
        self._sender.expect(snapshot)

    def heard(self, snapshot: int) -> None:
        """The daemon knows this one, or it is sent again, or it is lost."""
        self._sender.heard(snapshot)

    def withdraw(self, staged: Staged) -> bool:
        """Send no more of it; False when the daemon may have it."""
        return staged.slot in self.slots and self._sender.withdraw(staged.ticket.snapshot)

    def news(self) -> list[Accepted | Failed]:
        """What the thread has to say."""
        return self._sender.news()

    def settle(self, under_way: Collection[Staged]) -> None:
        """Free the memory of snapshots that are saved or lost: it is read no more."""
        needed = [staged.slot for staged in under_way]
        for slot in self.slots:
            header = slot.header()
            if header.state is SlotState.SEALED and not any(slot is one for one in needed):
                self._sender.forget(header.snapshot)
                if not self._sender.holds(slot):
                    slot.release()

    def close(self) -> None:
        """End the thread, let go of the memory."""
        self._sender.close()
        self.slots.close()
