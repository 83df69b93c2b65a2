"""The client's side of its slots: which it has, which is free, and the one copy that fills one."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptd.disk.save_error import save_error
from ckptd.errors import CkptdError, ProtocolError
from ckptd.link.ticket import Ticket
from ckptd.link.wire import SlotInfo
from ckptd.snapshot.slots import Slot, SlotState, needed_bytes

__all__ = ["Payload", "SlotSet", "Staged", "Underway", "fill", "freed_on_error"]

log = logging.getLogger(__name__)


class Underway(Protocol):
    """A copy beside the training. From its end on it touches the memory no more.

    Attributes:
        error: Why it failed; None while it hasn't.
    """

    error: BaseException | None

    @property
    def has_ended(self) -> bool:
        """Whether every byte has arrived, or one can't."""

    @property
    def interrupted_here(self) -> bool:
        """Whether this call interrupts it in its own thread: it can't end before that."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when it has ended; False when that took longer. With None, no bound, it helps.

        Raises TimedOut where this call interrupts it.
        """


@dataclass(frozen=True, slots=True)
class Payload:
    """A snapshot ready to be copied.

    Attributes:
        copy: Writes the tensors' bytes into the memory it is given.
        data_bytes: Length of that memory.
        descriptor: The encoded descriptor.
        beside: Writes there what the caller may change at once, and begins with the rest, which no optimizer
            changes before it is copied; what it is given besides is called, by another thread, when that has
            ended. None: `copy` does it all.
    """

    copy: Callable[[memoryview], None]
    data_bytes: int
    descriptor: bytes
    beside: Callable[[memoryview, Callable[[], None]], Underway] | None = None

    @property
    def size(self) -> int:
        """Bytes of a slot that can hold it."""
        return needed_bytes(self.data_bytes, len(self.descriptor))


@dataclass(slots=True)
class Staged:
    """A snapshot that lies in a slot: what is needed to push it, and to push it again."""

    ticket: Ticket
    slot: Slot
    generation: int

    def in_slot(self, *states: SlotState) -> bool:
        """Whether the slot still holds this snapshot in one of these states (default: sealed, writing)."""
        if self.slot.closed:
            return False  # it was free, and somebody had removed its file
        try:
            header = self.slot.header()
        except ProtocolError:
            return False
        held = header.state in (states or (SlotState.SEALED, SlotState.WRITING))
        return held and (header.generation, header.snapshot) == (self.generation, self.ticket.snapshot)


class SlotSet:
    """The slots a daemon made for one client. Not safe for use by several threads at once."""

    def __init__(self, client_id: str, run: str) -> None:
        self.removed = 0  #: how many were given up because somebody has removed their files
        self._client_id, self._run = client_id, run
        self._name = re.compile(rf"slot-{client_id}-[0-9]{{1,9}}-[0-9a-f]{{8}}", re.ASCII)
        self._slots: dict[str, Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def __contains__(self, slot: Slot) -> bool:
        return self._slots.get(slot.name) is slot

    def update(self, slot_dir: str, infos: Sequence[SlotInfo], *, keep: Sequence[Slot] = ()) -> None:
        """Have exactly the slots that the daemon lists: map and touch new ones, unmap the others.

        Args:
            slot_dir: Their folder.
            infos: The daemon's list.
            keep: Slots to leave mapped even when they are listed no more: what they hold isn't saved yet.

        Raises:
            ProtocolError: A name or a file that can't be a slot of this client.
            SaveFailed: One can't be opened or mapped now; the next call tries it again.
        """
        wanted = {info.name for info in infos}
        for name in [name for name in self._slots if name not in wanted]:
            slot = self._slots.pop(name)
            if slot not in keep:
                slot.close()
        for name in sorted(wanted - set(self._slots)):
            try:
                self._slots[name] = self._open(slot_dir, name)
            except FileNotFoundError:
                continue  # gone again; the daemon's next list won't have it
            except OSError as error:
                raise save_error(error, "a slot can't be mapped now", Path(slot_dir) / name) from error

    def find_free(self, size: int) -> Slot | None:
        """The smallest free slot of at least `size` bytes whose file is there: else nobody could adopt what it holds."""
        large_enough = [slot for slot in self._free() if slot.capacity >= size]
        for slot in sorted(large_enough, key=lambda slot: slot.capacity):
            if slot.in_place():
                return slot
            self.give_up(slot)
        return None

    def must_grow(self, size: int, count: int) -> bool:
        """Whether the daemon has something to make: a slot is missing, or a free one is too small."""
        return len(self._slots) < count or any(slot.capacity < size for slot in self._free())

    def let_go_below(self, size: int) -> None:
        """Unmap free slots that are too small, so that their memory is there for their successors."""
        for slot in self._free():
            if slot.capacity < size:
                self._slots.pop(slot.name).close()

    def forget(self, name: str) -> None:
        """The daemon has removed this slot; it stays mapped only if there is something in it again."""
        slot = self._slots.pop(name, None)
        if slot is not None and _is_free(slot):
            slot.close()

    def give_up(self, slot: Slot) -> None:
        """Somebody has removed the file of this slot."""
        self.removed += 1
        self.forget(slot.name)

    def close(self) -> None:
        """Unmap all."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _free(self) -> list[Slot]:
        return [slot for slot in self._slots.values() if _is_free(slot)]

    def _open(self, slot_dir: str, name: str) -> Slot:
        if not self._name.fullmatch(name) or not os.path.isabs(slot_dir):
            raise ProtocolError("not a slot of this client", where=slot_dir, seen=name)
        slot = Slot.open(Path(slot_dir) / name)
        header = slot.header()
        if header.state is SlotState.FILLING and header.client_id == self._client_id:
            slot.release()  # left by a copy of ours that failed: nobody fills it now
        slot.prefault()
        return slot


def fill(slot: Slot, owner: tuple[str, str], snapshot: int, payload: Payload) -> int:
    """Copy a snapshot into a free slot and seal it; returns its generation. After an error the slot is free.

    Args:
        slot: A free slot of at least payload.size bytes.
        owner: (client id, run).
        snapshot: The client's number of it.
        payload: What to copy.
    """
    generation = slot.begin(*owner, snapshot).generation
    with freed_on_error(slot):
        payload.copy(slot.data[: payload.data_bytes])
        slot.seal(payload.descriptor, payload.data_bytes)
    return generation


@contextlib.contextmanager
def freed_on_error(slot: Slot) -> Iterator[None]:
    """Surrounds the filling of a slot: one that fails leaves it free."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptdError):
            if slot.header().state is SlotState.FILLING:
                slot.release()
        raise


def _is_free(slot: Slot) -> bool:
    try:
        return slot.header().state is SlotState.FREE
    except ProtocolError as error:
        log.warning("slot.unusable name=%s error=%s", slot.name, error)
        return False
