"""The slots of one root: made, found again after a restart, looked up by name, removed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from ckptd.disk.slot_folder import RECORD, remove_slot_folder
from ckptd.errors import CkptdError, ProtocolError
from ckptd.limits import PAGE_ALIGNMENT
from ckptd.snapshot.sizes import show_slots
from ckptd.snapshot.slots import HEADER_BYTES, Slot, SlotHeader, SlotState
from ckptd_daemon.core.room import Room, check_room, rooms_for

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"slot-([0-9a-f]{32})-([0-9]{1,9})-[0-9a-f]{8}", re.ASCII)
_LOOK_EVERY_S: Final = 2.0
_ZEROS: Final = bytes(1024 * 1024)


class SlotPool:
    """The slots in one folder, which is private and belongs to the holder of the root's lock.

    `make` may run in another thread (it allocates memory, which takes time); everything else belongs to the
    loop's.

    Args:
        folder: Where the slots lie; already checked.
        rooms: The bounds on shared memory; handed in by tests.
        prepare: Makes the folder, and what it says of its root, when somebody has removed them. Default: the folder.

    Attributes:
        unread: Slots that lie in the folder and couldn't be taken in, with the reason: they may hold what was
            sealed, so they stay, and each scan tries them again.
    """

    def __init__(
        self, folder: Path, *, rooms: Callable[[Path], Iterable[Room]] = rooms_for,
        prepare: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._rooms, self._prepare = rooms, prepare or (lambda: folder.mkdir(mode=0o700, exist_ok=True))
        self._said, self._look_at = set[str](), 0.0
        self._slots: dict[str, tuple[str, Slot]] = {}
        self.unread: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"SlotPool({self.folder}, {len(self._slots)} slots)"

    def __iter__(self) -> Iterator[Slot]:
        return iter([slot for _, slot in self._slots.values()])

    def scan(self) -> list[tuple[Slot, SlotHeader]]:
        """Open every slot that an earlier daemon left and that isn't open yet.

        Removed, and said, is only what can't be a slot or surely holds nothing sealed; see `unread` for the rest.
        """
        found, unread = [], {}
        for path in sorted(self.folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or path.name in self._slots:
                continue
            try:
                slot, header = _opened(path, match[1])
            except FileNotFoundError:
                continue
            except (OSError, CkptdError) as error:
                if isinstance(error, CkptdError) and not _may_hold(path):
                    _drop(path, error)
                else:
                    unread[path.name] = str(error)
                continue
            self._slots[slot.name] = (match[1], slot)
            found.append((slot, header))
        for name in unread.keys() - self.unread.keys():
            log.error("slot.kept slot=%s reason=%s; tried again later", self.folder / name, unread[name])
        self.unread = unread
        return found

    def make(
        self, client_id: str, run: str, owner: tuple[int, int], count: int, slot_bytes: int
    ) -> list[Slot]:
        """Make `count` slots of that many bytes, allocated and pre-faulted; `add` them in the loop's thread.

        Raises:
            SharedMemoryTooSmall: There is no room for all of them; none is made.
            OSError: Another failure; none is left.
        """
        if not (self.folder / RECORD).exists():
            self._prepare()
        check_room(
            count * slot_bytes, self._rooms(self.folder), f"the slots ({show_slots(count, slot_bytes)})"
        )
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

    def look(self, now: float) -> None:
        """Every few seconds, see whether somebody has removed files of slots: what is in them dies with this process.

        That is said once of each. Their client asks for others with its next snapshot.
        """
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        for slot in self:
            self._say_if_removed(slot)

    def _say_if_removed(self, slot: Slot) -> None:
        if slot.name in self._said or slot.in_place():
            return
        self._said.add(slot.name)
        header = header_of(slot)
        log.error(
            "slot.removed slot=%s state=%s somebody has removed its file (logind's RemoveIPC=yes? a cleaner?)",
            slot.path, "damaged" if header is None else header.state.name.lower(),
        )  # fmt: skip

    def rooms(self) -> list[Room]:
        """The bounds on more of them, now."""
        return list(self._rooms(self.folder))

    def owned(self) -> list[tuple[str, Slot]]:
        """(client id, slot) of every slot."""
        return list(self._slots.values())

    def pieces(self) -> list[tuple[str, int]]:
        """(client id, bytes) of every slot."""
        return [(owner, slot.capacity) for owner, slot in self._slots.values()]

    def get(self, client_id: str, name: str) -> Slot | None:
        """That slot, if it is this client's; one that couldn't be opened before is tried again."""
        if name in self.unread and name.startswith(f"slot-{client_id}-"):
            with contextlib.suppress(OSError, CkptdError):
                self.add(client_id, [_opened(self.folder / name, client_id)[0]])
                del self.unread[name]
        owner, slot = self._slots.get(name, ("", None))
        return slot if owner == client_id else None

    def remove(self, slot: Slot) -> None:
        """Give its memory back. Nobody may be using it."""
        self._say_if_removed(slot)
        self._said.discard(slot.name)
        self._slots.pop(slot.name, None)
        mine = slot.in_place()
        slot.close()
        if not mine:
            return
        with contextlib.suppress(OSError):
            slot.path.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        """Give back what holds no snapshot. Who fills a slot meanwhile has its memory mapped still."""
        for slot in list(self):
            header = header_of(slot)
            if header is None or not holds_snapshot(header):
                self.remove(slot)
        with contextlib.suppress(OSError):  # not empty
            remove_slot_folder(self.folder)

    def close(self) -> None:
        """Unmap all slots and, when none is left, remove the folder."""
        for slot in self:
            slot.close()
        self._slots.clear()
        with contextlib.suppress(OSError):  # not empty: somebody still needs what is in it
            remove_slot_folder(self.folder)


def _opened(path: Path, client_id: str) -> tuple[Slot, SlotHeader]:
    slot = Slot.open(path)
    try:
        header = slot.header()
        if header.client_id != client_id:
            raise ProtocolError("another client's", seen=header.client_id, wanted=client_id)
    except BaseException:
        slot.close()
        raise
    return slot, header


def _may_hold(path: Path) -> bool:
    """Whether a slot that can't be used may hold what somebody sealed: it is kept then, for a person to look at.

    A header that is lost proves nothing of the data behind it, unless nothing was ever written. A whole one that
    says free or filling does.
    """
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        if found.st_size < 2 * PAGE_ALIGNMENT or found.st_size % PAGE_ALIGNMENT:
            return False
        if _is_blank(path):
            return False
        slot = Slot.open(path)
    except (OSError, CkptdError):
        return True
    header = header_of(slot)
    slot.close()
    return header is None or holds_snapshot(header)


def _is_blank(path: Path) -> bool:
    """Whether there are only zeros behind the header: its maker was killed before that was whole. A snapshot has others."""
    with path.open("rb", buffering=0) as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(len(_ZEROS)):
            if chunk != _ZEROS[: len(chunk)]:
                return False
    return True


def _drop(path: Path, reason: CkptdError) -> None:
    log.warning("slot.dropped slot=%s reason=%s", path.name, reason)
    with contextlib.suppress(OSError):
        path.unlink()


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
