"""The snapshots a client has staged and not yet seen saved, and what the daemon's notices make of them.

No socket and no clock here: replies and times are handed in, and what has to be asked or pushed again is
handed back. Nothing becomes committed but by a whole notice about this client, snapshot and step.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Final, cast

from ckptd.errors import CheckpointGone, CkptdError, NoDaemon, OutcomeUnknown, SaveFailed
from ckptd.link.failures import Failure, Failures
from ckptd.link.staging import Staged
from ckptd.link.ticket import Ticket, TicketState
from ckptd.link.wire import Accepted, Notice, WireError
from ckptd.names import parse_step_folder
from ckptd.snapshot.slots import SlotState

__all__ = ["Outbox"]

log = logging.getLogger(__name__)

_STATES: Final = frozenset(
    {"staged", "writing", "committed", "verified", "corrupt", "failed", "superseded", "unknown"}
)


class Outbox:
    """Not safe for use by several threads at once.

    Args:
        client_id: Only notices for it count.
        run_dir: Folder of the run, where committed checkpoints lie.
        failures: Where failures are entered.
    """

    def __init__(self, client_id: str, run_dir: Path, failures: Failures) -> None:
        self._client_id, self._run_dir, self._failures = client_id, run_dir, failures
        self._staged: dict[int, Staged] = {}
        # Their verification may still be told; nobody needs it once the caller has dropped the ticket.
        self._committed: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def staged(self) -> list[Staged]:
        """What isn't known to be saved or lost, oldest first."""
        return list(self._staged.values())

    def watched(self) -> list[Ticket]:
        """Tickets of committed snapshots that somebody still holds and that aren't verified yet."""
        return [ticket for ticket in list(self._committed.values()) if not ticket.settled]

    def add(self, staged: Staged) -> None:
        self._staged[staged.ticket.snapshot] = staged

    def accepted(self, reply: Accepted) -> None:
        staged = self._staged.get(reply.snapshot)
        if staged is not None:
            staged.ticket.sequence = reply.sequence

    def refused(self, snapshot: int, error: CkptdError) -> None:
        """The push of this snapshot was refused."""
        if isinstance(error, NoDaemon):
            return  # that daemon leaves: the slot is kept, the next one adopts it, and is asked for it
        staged = self._staged.get(snapshot)
        if staged is not None and not staged.in_slot(SlotState.SEALED):
            return  # its slot moved on: an earlier push of it was accepted, and how that ends will be told
        self._fail(snapshot, error)

    def take(self, notice: Notice, now: float) -> Staged | None:
        """Enter one notice. Returns what to push again: a snapshot unknown there that is still here."""
        if notice.client_id != self._client_id or notice.state not in _STATES:
            log.warning("outbox.foreign_notice snapshot=%d state=%s", notice.snapshot, notice.state)
            return None
        staged = self._staged.get(notice.snapshot)
        ticket = staged.ticket if staged is not None else self._committed.get(notice.snapshot)
        # 0: not read yet, by a daemon that took it over. Once there is a name, that says the step as well.
        if ticket is not None and notice.state != "unknown" and notice.step not in (0, ticket.step):
            log.warning("outbox.wrong_step snapshot=%d seen=%d", ticket.snapshot, notice.step)
            return None
        if notice.state == "unknown":
            return self._unknown(staged, notice.error)
        if notice.state in ("committed", "verified", "corrupt"):
            self._saved(notice, staged, ticket, now)
        elif notice.state == "failed":
            error = notice.error.exception() if notice.error is not None else SaveFailed("failed")
            self._fail(notice.snapshot, error)
        elif notice.state == "superseded":
            self._superseded(notice)
        elif ticket is not None:
            ticket.become(cast(TicketState, notice.state))
            ticket.sequence = notice.sequence or ticket.sequence
        return None

    def give_up(self, why: CkptdError) -> list[Ticket]:
        """At the end: what is still staged won't be heard of any more. Returns those tickets."""
        left = [staged.ticket for staged in self._staged.values()]
        for ticket in left:
            self._lost(ticket, why)
        self._staged.clear()
        return left

    # --- inside ----------------------------------------------------------------------------------

    def _saved(self, notice: Notice, staged: Staged | None, ticket: Ticket | None, now: float) -> None:
        if ticket is not None:
            folder = parse_step_folder(notice.name)
            if folder is None or folder[0] != ticket.step:
                log.warning("outbox.wrong_name snapshot=%d name=%r", notice.snapshot, notice.name)
                return
            ticket.path = self._run_dir / notice.name
            ticket.sequence = notice.sequence or ticket.sequence
            ticket.become("committed")
        if staged is not None:
            del self._staged[notice.snapshot]
            self._committed[notice.snapshot] = staged.ticket
            self._failures.committed(now, others_wait=bool(self._staged))
        error = notice.error.exception() if notice.error is not None else None
        changed = ticket is None or ticket.become(cast(TicketState, notice.state), error=error)
        if notice.state == "corrupt" and changed:
            cause = error or CkptdError("its bytes on disk are wrong", where=notice.name)
            found = "is gone from the disk" if isinstance(cause, CheckpointGone) else "is corrupt on disk"
            self._failures.failed(Failure(notice.snapshot, notice.step, cause, found))

    def _unknown(self, staged: Staged | None, error: WireError | None) -> Staged | None:
        if staged is None:
            return None
        if staged.in_slot():
            return staged
        del self._staged[staged.ticket.snapshot]
        seen = f"snapshot {staged.ticket.snapshot}"
        never_heard = CkptdError("the daemon that answers now doesn't know it", seen=seen)
        self._lost(staged.ticket, never_heard if error is None else error.exception())
        return None

    def _lost(self, ticket: Ticket, why: CkptdError) -> None:
        error = OutcomeUnknown(
            why.what, where=why.where, seen=why.seen, wanted=why.wanted,
            todo=why.todo or f"look for step {ticket.step} with: ckptd list",
        )  # fmt: skip
        if ticket.become("unknown", error=error):
            self._failures.failed(
                Failure(ticket.snapshot, ticket.step, error, "may be saved or not, it can't be told")
            )

    def _superseded(self, notice: Notice) -> None:
        staged = self._staged.pop(notice.snapshot, None)
        # With an error of its own it had failed before it gave way.
        failed = None if notice.error is None else notice.error.exception()
        error = failed or SaveFailed("a newer snapshot took its slot")
        if staged is not None and staged.ticket.become("superseded", error=error):
            step = staged.ticket.step
            self._failures.failed(
                Failure(notice.snapshot, step, error, "was superseded", chosen=failed is None)
            )

    def _fail(self, snapshot: int, error: CkptdError) -> None:
        staged = self._staged.pop(snapshot, None)
        if staged is not None and staged.ticket.become("failed", error=error):
            self._failures.failed(Failure(snapshot, staged.ticket.step, error))
