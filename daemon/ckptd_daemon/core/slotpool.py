"""The slots of one root: made, found again after a restart, looked up by name, removed."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from ckptd.errors import ProtocolError
from ckptd.snapshot.slots import Slot, SlotHeader, SlotState
from ckptd_daemon.core.room import Room, check_room, rooms_for

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"slot-([0-9a-f]{32})-([0-9]{1,9})-[0-9a-f]{8}", re.ASCII)


class SlotPool:
    """The slots in one folder, which is private and belongs to the holder of the root's lock.

    `make` may run in another thread (it allocates memory, which takes time); everything else belongs to the
    loop's.

    Args:
        folder: Where the slots lie; already checked.
        rooms: The bounds on shared memory; handed in by tests.
    """

    def __init__(self, folder: Path, *, rooms: Callable[[Path], Iterable[Room]] = rooms_for) -> None:
        self.folder = folder
        self._rooms = rooms
        self._slots: dict[str, tuple[str, Slot]] = {}

    def __repr__(self) -> str:
        return f"SlotPool({self.folder}, {len(self._slots)} slots)"

    def __iter__(self) -> Iterator[Slot]:
        return iter([slot for _, slot in self._slots.values()])

    def scan(self) -> list[tuple[Slot, SlotHeader]]:
        """Open every slot that an earlier daemon left. What can't be one any more is removed, and said."""
        found = []
        for path in sorted(self.folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            try:
                slot = Slot.open(path)
                header = slot.header()
                if header.client_id != match[1]:
                    raise ProtocolError("another client's", seen=header.client_id, wanted=match[1])
            except (OSError, ProtocolError) as error:
                log.warning("slot.dropped slot=%s reason=%s", path.name, error)
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            self._slots[slot.name] = (match[1], slot)
            found.append((slot, header))
        return found

    def make(
        self, client_id: str, run: str, owner: tuple[int, int], count: int, slot_bytes: int
    ) -> list[Slot]:
        """Make `count` slots of that many bytes, allocated and pre-faulted; `add` them in the loop's thread.

        Raises:
            SharedMemoryTooSmall: There is no room for all of them; none is made.
            OSError: Another failure; none is left.
        """
        check_room(count * slot_bytes, self._rooms(self.folder))
        made: list[Slot] = []
        try:
            for number in range(count):
                name = f"slot-{client_id}-{number}-{secrets.token_hex(4)}"
                path = self.folder / name
                made.append(Slot.create(path, slot_bytes, owner=owner, client_id=client_id, run=run))
                made[-1].prefault(write=False)
        except BaseException:
            self.discard(made)
            raise
        return made

    def add(self, client_id: str, slots: Iterable[Slot]) -> None:
        """Take in what `make` made."""
        self._slots.update({slot.name: (client_id, slot) for slot in slots})

    def discard(self, slots: Iterable[Slot]) -> None:
        """Remove slots that were never added."""
        for slot in slots:
            slot.close()
            slot.path.unlink(missing_ok=True)

    def of(self, client_id: str) -> list[Slot]:
        """The slots of one client."""
        return [slot for owner, slot in self._slots.values() if owner == client_id]

    def get(self, client_id: str, name: str) -> Slot | None:
        """That slot, if it is this client's."""
        owner, slot = self._slots.get(name, ("", None))
        return slot if owner == client_id else None

    def remove(self, slot: Slot) -> None:
        """Give its memory back. Nobody may be using it."""
        self._slots.pop(slot.name, None)
        slot.close()
        with contextlib.suppress(OSError):
            slot.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap all slots and, when none is left, remove the folder."""
        for slot in self:
            slot.close()
        self._slots.clear()
        with contextlib.suppress(OSError):  # not empty: somebody still needs what is in it
            self.folder.rmdir()


def header_of(slot: Slot) -> SlotHeader | None:
    """Its header; None when its client destroyed it."""
    try:
        return slot.header()
    except ProtocolError:
        return None


def holds_snapshot(header: SlotHeader) -> bool:
    """Whether a slot holds a snapshot that must be written."""
    return header.state in (SlotState.SEALED, SlotState.WRITING)


def adoption_order(slots: Iterable[tuple[Slot, SlotHeader]]) -> list[tuple[Slot, SlotHeader]]:
    """In which order to accept snapshots whose client is gone: as accepted before, then as sealed."""

    def place(held: tuple[Slot, SlotHeader]) -> tuple[str, bool, int, str, int]:
        header = held[1]
        return header.run, header.sequence == 0, header.sequence, header.client_id, header.snapshot

    return sorted(slots, key=place)
