"""The memory that streamed snapshots are received in: slots that are no files, kept per client and used again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ckptd.errors import CkptdError
from ckptd.snapshot.room import Room, check_room, memory_rooms
from ckptd.snapshot.sizes import show_bytes
from ckptd.snapshot.slot_layout import page_up
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.core.worker import Worker

log = logging.getLogger(__name__)

#: Told that asking again for this client makes sense now, or that it doesn't, with the reason.
Ready = Callable[[str, CkptdError | None], None]


class StreamBuffers:
    """Of the loop's thread; memory is made and touched in the maker's.

    Args:
        maker: The thread that makes them.
        staged: Counts what clients have, these included, and holds it against the budget.
        ready: Called when take() may have something for a client that it had nothing for.
        rooms: The bounds on memory; handed in by tests.
    """

    def __init__(
        self, maker: Worker, staged: StagedBytes, ready: Ready, *,
        rooms: Callable[[], Iterable[Room]] = memory_rooms,
    ) -> None:  # fmt: skip
        self._maker, self._ready, self._rooms = maker, ready, rooms
        self._held: dict[str, list[Slot]] = {}
        self._left: list[Slot] = []  # being written for clients that are gone
        self._making: dict[str, int] = {}  # bytes, by client
        self._staged = staged
        staged.count_also(self._pieces)
        self._short: dict[str, CkptdError] = {}  # who waits for room, and why there is none
        self._count = 0

    def take(self, client_id: str, run: str, size: int, most: int) -> Slot | None:
        """A free buffer of at least `size` bytes, of at most `most`; None while there is none: `ready` says when."""
        held = self._held.setdefault(client_id, [])
        free = [slot for slot in held if slot.header().state is SlotState.FREE]
        fitting = [slot for slot in free if slot.capacity >= size]
        if fitting:
            return min(fitting, key=lambda slot: slot.capacity)
        for slot in free:  # too small; its memory shall be there for its successor
            held.remove(slot)
            slot.close()
        if client_id not in self._making and len(held) < most:
            self._make(client_id, run, size)
        return None

    def of(self, client_id: str) -> list[Slot]:
        return list(self._held.get(client_id, ()))

    def owns(self, slot: Slot) -> bool:
        return any(slot is one for held in (*self._held.values(), self._left) for one in held)

    def freed(self, slot: Slot) -> None:
        """What it held is written, or given up."""
        if slot in self._left:
            self._left.remove(slot)
            slot.close()
        for client_id, held in list(self._held.items()):
            if slot in held or client_id in self._short:
                self._short.pop(client_id, None)
                self._ready(client_id, None)

    def forget(self, client_id: str) -> None:
        """The client is gone: only what is still being written stays, until it is."""
        self._short.pop(client_id, None)
        for slot in self._held.pop(client_id, ()):
            if slot.header().state in (SlotState.SEALED, SlotState.WRITING):
                self._left.append(slot)
            else:
                slot.close()

    def unwritten(self) -> int:
        """How many hold a snapshot that isn't written."""
        slots = [*self._left, *(slot for held in self._held.values() for slot in held)]
        return sum(slot.header().state in (SlotState.SEALED, SlotState.WRITING) for slot in slots)

    def _pieces(self) -> list[tuple[str, int]]:
        held = [(client_id, slot.capacity) for client_id, slots in self._held.items() for slot in slots]
        return [*held, *self._making.items(), *(("", slot.capacity) for slot in self._left)]

    # --- making ----------------------------------------------------------------------------------

    def _make(self, client_id: str, run: str, size: int) -> None:
        refusal = self._staged.refusal(client_id, f"a streamed snapshot of {show_bytes(size)}", page_up(size))
        self._making[client_id] = page_up(size)
        self._count += 1
        name = f"stream-{client_id}-{self._count}"

        def make() -> Slot:
            if refusal is not None:
                raise refusal
            check_room(size, self._rooms(), "a snapshot that is streamed")
            slot = Slot.anonymous(name, size, client_id=client_id, run=run)
            slot.prefault()
            return slot

        self._maker.submit(make, lambda made: self._made(client_id, made))

    def _made(self, client_id: str, made: Slot | Exception) -> None:
        self._making.pop(client_id, None)
        held = self._held.get(client_id)
        if isinstance(made, Slot):
            if held is None:  # it has left meanwhile
                made.close()
                return
            held.append(made)
            log.info("stream.buffer name=%s bytes=%d", made.name, made.capacity)
            self._ready(client_id, None)
        elif held is not None:
            error = made if isinstance(made, CkptdError) else CkptdError("no buffer", seen=str(made))
            if self.unwritten():  # there will be room when that is written
                self._short[client_id] = error
            else:
                self._ready(client_id, error)
