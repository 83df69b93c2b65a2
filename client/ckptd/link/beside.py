"""The one snapshot of a client that is still being copied while training goes on.

Whoever is first seals its slot and tells the daemon: a thread that is told of the copy's end, or a call that waits for
it. Calls wait while they hold the writer's lock: whoever copies never takes it, and for the thread that does nobody waits.
"""

from __future__ import annotations

import threading

from ckptd.errors import CkptdError, SaveFailed
from ckptd.link.daemon_link import DaemonLink
from ckptd.link.failures import Failure, Failures
from ckptd.link.filling import Filling
from ckptd.link.staging import Payload
from ckptd.link.ticket import Ticket
from ckptd.snapshot.slots import Slot

__all__ = ["BesideTraining"]


class BesideTraining:
    """Args:
    lock: The writer's; it guards the link, and this.
    link: Where sealed slots are staged.
    failures: Where a copy that failed is entered.
    """

    def __init__(self, lock: threading.RLock, link: DaemonLink, failures: Failures) -> None:
        self._lock, self._link, self._failures = lock, link, failures
        self._filling: Filling | None = None

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._filling is not None

    @property
    def interrupted_here(self) -> bool:
        """Whether this call interrupts the copy in its own thread."""
        filling = self._filling
        return filling is not None and filling.interrupted_here

    def begin(self, slot: Slot, ticket: Ticket, payload: Payload) -> None:
        """Copy into a free slot what can't wait, and begin with the rest. After an error the slot is free."""
        with self._lock:
            self._filling = Filling(slot, self._link.owner, ticket, payload, self._ended)
            self._link.filling = slot
            self._ended()  # of a copy that has ended already nothing more is heard

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait for the copy, seal the slot, tell the daemon; False when that took longer. With None, no bound, it helps.

        A copy that failed is entered as a failure. Raises TimedOut where the call interrupts the copy, see
        BackgroundCopy.wait.
        """
        filling = self._filling
        if filling is None:
            return True
        if not filling.wait(timeout_s):
            return False
        self._ended()
        return True

    def give_up(self, why: CkptdError) -> None:
        """At the end: a snapshot that still isn't copied is lost."""
        if self._filling is not None:
            self._fail(self._filling.ticket, why)
            self.forget()

    def forget(self) -> None:
        self._filling = self._link.filling = None

    def _ended(self) -> None:
        with self._lock:
            filling = self._filling
            if filling is None or not filling.has_ended:
                return
            self.forget()
            try:
                self._link.stage(filling.seal())
            except CkptdError as error:
                self._fail(filling.ticket, error)
            except Exception as error:  # noqa: BLE001 - there may be no caller to raise it to
                seen = f"{type(error).__name__}: {error}"
                self._fail(filling.ticket, SaveFailed("the daemon couldn't be told", seen=seen))

    def _fail(self, ticket: Ticket, error: CkptdError) -> None:
        if ticket.become("failed", error=error):
            self._failures.failed(Failure(ticket.snapshot, ticket.step, error))
