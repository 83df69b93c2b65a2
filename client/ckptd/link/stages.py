"""Where a client's snapshots are staged: in the daemon's slots or, where those can't be had, in its own memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ckptd.disk.rootdir import Root
from ckptd.errors import ProtocolError, SharedMemoryTooSmall, SlotsOutOfReach
from ckptd.link import wire
from ckptd.link.client_options import Transport
from ckptd.link.session import Session
from ckptd.link.staging import Payload, SlotSet, Staged, fill
from ckptd.link.streaming import Streaming
from ckptd.link.wire import Reserved
from ckptd.snapshot.sizes import show_slots
from ckptd.snapshot.slots import Slot

__all__ = ["Stages"]

log = logging.getLogger(__name__)


class Stages:
    """Not safe for use by several threads at once.

    Args:
        root: The root.
        owner: (client id, run).
        session: The attachment to the daemon that has the slots.
        count: How many snapshots may be under way.
        transport: See Streaming.

    Attributes:
        streaming: What takes the place of slots.
    """

    def __init__(
        self, root: Root, owner: tuple[str, str], session: Session, count: int, transport: Transport
    ) -> None:
        self.streaming = Streaming(root, owner, count, transport)
        self._owner, self._session, self._count = owner, session, count
        self._slots, self._slot_bytes = SlotSet(*owner), 0
        self._had_slots = False  # once there were some, a folder that is gone was removed

    def greet(self, attached: wire.Attached, held: Sequence[Slot], unheard: Sequence[int]) -> None:
        """Take the slots of a daemon that was attached to just now; those in `held` are still needed.

        unheard: Snapshots that it is asked about: none of them, and no later one, is streamed before it has answered.
        """
        names = {slot.name for slot in held}  # while it streams, a slot is only of use for what lies in it
        infos = [info for info in attached.slots if not self.streaming.on or info.name in names]
        self._slots.update(attached.slot_dir, infos, keep=held)
        self.streaming.go_to(self._session, unheard)

    def reserve(self, size: int, timeout_s: float, held: Sequence[Slot]) -> None:
        """Have slots made, mapped and touched, or memory of this process's own where there can be none.

        Raises what Session.ask raises: SharedMemoryTooSmall where there is no room for either, OverBudget.
        """
        if not self.streaming.on:
            try:
                self._reserve_slots(size, timeout_s, held)
                return
            except (SharedMemoryTooSmall, SlotsOutOfReach) as error:
                self.streaming.instead_of_slots(error)
        self.streaming.slots.reserve(size)

    def move(self, staged: Staged, timeout_s: float, held: Sequence[Slot]) -> None:
        """Bring what lies in a slot that the daemon has no more, still mapped here, to another one.

        Raises what reserve() raises, or ProtocolError: none is free.
        """
        old, size = staged.slot, staged.slot.capacity
        header, descriptor = old.header(), old.descriptor()
        if self.find_free(size) is None and self.must_grow(size):
            self.reserve(size, timeout_s, held)
        new = self.find_free(size)
        if new is None:
            raise ProtocolError("no free slot to move the snapshot to")

        def copy(target: memoryview) -> None:
            target[:] = old.data[: header.data_bytes]

        payload = Payload(copy, header.data_bytes, descriptor)
        staged.generation = fill(new, self._owner, staged.ticket.snapshot, payload)
        staged.slot = new
        if not old.in_place():
            old.release()  # the daemon may have it mapped still
        old.close()

    def memories(self) -> list[memoryview]:
        """What is reserved now."""
        return [slot.data for slot in (*self._slots, *self.streaming.slots)]

    def find_free(self, size: int) -> Slot | None:
        """A free one of at least `size` bytes."""
        return self.streaming.slots.find_free(size) if self.streaming.on else self._slots.find_free(size)

    def must_grow(self, size: int) -> bool:
        """Whether there is something to make before one of `size` bytes can come free."""
        if self.streaming.on:
            return self.streaming.slots.must_grow(size)
        return self._slots.must_grow(size, self._count)

    def is_slot(self, slot: Slot) -> bool:
        """Whether the daemon has it too."""
        return slot in self._slots

    def is_private(self, slot: Slot) -> bool:
        """Whether it is this process's own memory, to be streamed from."""
        return slot in self.streaming.slots

    def forget(self, name: str) -> None:
        """The daemon has removed this slot."""
        self._slots.forget(name)

    @property
    def what_remains(self) -> str:
        """What becomes of what isn't saved yet when this process ends."""
        if self.streaming.on:
            return "what the daemon has not received yet is lost with this process"
        return "what is staged stays in shared memory, and a daemon writes it"

    def still_there(self, slot: Slot) -> bool:
        """Whether it is a slot whose file is there; one whose isn't is no slot any more."""
        if self.is_slot(slot) and not slot.in_place():
            self._slots.give_up(slot)
        return self.is_slot(slot)

    def removed_note(self) -> str:
        """That slots were given up since the last call, because somebody has removed their files; "" if none was."""
        count, self._slots.removed = self._slots.removed, 0
        if not count:
            return ""
        attached = self._session.attached
        where = attached.slot_dir if attached is not None else "shared memory"
        slots = f"{count} slot{'' if count == 1 else 's'}"
        return (
            f"somebody has removed {slots} of this client from {where} (logind's RemoveIPC=yes? a cleaner?): what "
            "lay there was safe only while this process or the daemon lived. Others are made"
        )

    def settle(self, staged: Sequence[Staged], held: Sequence[Slot]) -> None:
        """Free what was streamed and is saved or lost; once it streams, give slots back that nothing lies in."""
        self.streaming.settle(staged)
        if self.streaming.on and len(self._slots) and not any(map(self.is_slot, held)):
            request = wire.Reserve(id=0, client_id=self._owner[0], slot_bytes=0, slots=0)
            if self._session.send(request) is not None:
                self._slots.close()

    def close(self) -> None:
        """Let go of everything. What is sealed in a slot stays so."""
        self._slots.close()
        self.streaming.close()

    def _reserve_slots(self, size: int, timeout_s: float, held: Sequence[Slot]) -> None:
        attached = self._session.attached
        slot_dir = attached.slot_dir if attached is not None else ""
        if self._session.connected and not self._had_slots and not os.path.isdir(slot_dir):
            raise _out_of_reach(slot_dir)
        self._slots.let_go_below(size)
        self._slot_bytes = max(size, self._slot_bytes)
        request = wire.Reserve(id=0, client_id=self._owner[0], slot_bytes=self._slot_bytes, slots=self._count)
        log.info("slots.wanted what=%r where=%s", show_slots(self._count, self._slot_bytes), slot_dir)
        try:
            infos = self._session.ask(request, Reserved, timeout_s).slots
        except BaseException:
            self._slot_bytes = 0
            raise
        self._slots.update(slot_dir, infos, keep=held)
        self._had_slots = self._had_slots or len(self._slots) > 0
        if infos and not len(self._slots) and self._session.alive:
            self._session.send(wire.Reserve(id=0, client_id=self._owner[0], slot_bytes=0, slots=0))
            raise _out_of_reach(slot_dir)


def _out_of_reach(slot_dir: str) -> SlotsOutOfReach:
    return SlotsOutOfReach(
        "the daemon's slots can't be opened here", where=slot_dir, seen="this process sees another /dev/shm",
        todo="give both the same one (docker: --ipc, or a volume and CKPTD_SHM_DIR)",
    )  # fmt: skip
