"""A slot that is still being filled while training goes on: until it is sealed, its snapshot dies with the process."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.errors import CkptdError, SaveFailed
from ckptd.link.staging import Payload, Staged, freed_on_error
from ckptd.link.ticket import Ticket
from ckptd.snapshot.slots import Slot

__all__ = ["Filling"]


class Filling:
    """One snapshot whose copy has begun. The writer's lock guards it.

    Args:
        slot: A free slot of at least payload.size bytes. It is FILLING until `seal`, and free after an error.
        owner: (client id, run).
        ticket: The snapshot's.
        payload: What is copied; it has a `beside`.
        ended: Called in another thread when the copy has ended.
    """

    def __init__(
        self, slot: Slot, owner: tuple[str, str], ticket: Ticket, payload: Payload, ended: Callable[[], None]
    ) -> None:
        if payload.beside is None:
            raise ValueError("nothing of this payload is copied beside the training")
        self.ticket, self.slot, self._payload = ticket, slot, payload
        self._generation = slot.begin(*owner, ticket.snapshot).generation
        with freed_on_error(slot):
            self._copy = payload.beside(slot.data[: payload.data_bytes], ended)

    def __repr__(self) -> str:
        return f"<Filling {self.slot.name} with snapshot {self.ticket.snapshot}>"

    @property
    def has_ended(self) -> bool:
        """Whether the copy has ended, well or not."""
        return self._copy.has_ended

    @property
    def interrupted_here(self) -> bool:
        """Whether this call interrupts the copy in its own thread."""
        return self._copy.interrupted_here

    def wait(self, timeout_s: float | None) -> bool:
        """Return when the copy has ended; False when that took longer. With None, no bound, it helps.

        Raises TimedOut where the call interrupts the copy.
        """
        return self._copy.wait(timeout_s)

    def seal(self) -> Staged:
        """Seal the slot of a copy that has ended: from here on the snapshot survives this process.

        Raises:
            CkptdError: The copy failed, or the slot is no longer this snapshot's. The slot is free.
        """
        with freed_on_error(self.slot):
            error = self._copy.error
            if isinstance(error, CkptdError):
                raise error
            if error is not None:
                raise SaveFailed("its copy failed", seen=f"{type(error).__name__}: {error}") from error
            self.slot.seal(self._payload.descriptor, self._payload.data_bytes)
        return Staged(self.ticket, self.slot, self._generation)
