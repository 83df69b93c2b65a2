"""Where snapshots are staged that are streamed: slots that are no files, in this process's own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ckptd.snapshot.room import Room, check_room, memory_rooms
from ckptd.snapshot.sizes import show_slots
from ckptd.snapshot.slots import Slot, SlotState

__all__ = ["PrivateSlots"]


class PrivateSlots:
    """At most `count` of them, used again. Not safe for use by several threads at once.

    Args:
        client_id: Whose they are.
        run: Its run.
        count: How many.
        rooms: The bounds on memory; handed in by tests.
    """

    def __init__(
        self, client_id: str, run: str, count: int, *, rooms: Callable[[], Iterable[Room]] = memory_rooms
    ) -> None:
        self._client_id, self._run, self._count, self._rooms = client_id, run, count, rooms
        self._slots: list[Slot] = []
        self._made = 0

    def __contains__(self, slot: Slot) -> bool:
        return any(slot is one for one in self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots))

    def reserve(self, size: int) -> None:
        """Have slots of at least `size` bytes, touched; those too small are replaced once they are free.

        Raises:
            SharedMemoryTooSmall: There is no memory for them; none was made.
        """
        for slot in self._free():
            if slot.capacity < size:
                self._slots.remove(slot)
                slot.close()
        missing = self._count - len(self._slots)
        if missing <= 0:
            return
        check_room(missing * size, self._rooms(), f"{show_slots(missing, size)} in this process")
        made = []
        try:
            for _ in range(missing):
                self._made += 1
                name = f"private-{self._client_id}-{self._made}"
                made.append(Slot.anonymous(name, size, client_id=self._client_id, run=self._run))
                made[-1].prefault()
        except BaseException:
            for slot in made:
                slot.close()
            raise
        self._slots += made

    def find_free(self, size: int) -> Slot | None:
        """The smallest free slot of at least `size` bytes."""
        fitting = [slot for slot in self._free() if slot.capacity >= size]
        return min(fitting, key=lambda slot: slot.capacity, default=None)

    def must_grow(self, size: int) -> bool:
        """Whether reserve() has something to make."""
        return len(self._slots) < self._count or any(slot.capacity < size for slot in self._free())

    def close(self) -> None:
        """Let go of all; what lies in them is lost."""
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _free(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.header().state is SlotState.FREE]
