"""One snapshot() that finds no free slot: which of the client's older snapshots gives way to it.

Only the daemon may free a slot that it has accepted, and it may begin to write it at any moment: so it is asked. The
question says until when it may be granted: one that a stopped daemon reads later, when this snapshot was skipped
already, would lose the older one for nothing.
"""

from __future__ import annotations

from typing import Final

from ckptd.link.daemon_link import DaemonLink

__all__ = ["GivingWay"]

_ANSWER_S: Final = 2.0  # bound of the wait for one answer: the daemon's loop waits for nothing
_AGAIN_S: Final = 0.02  # what is neither freed nor being written is asked for again after so long
_WAY_BACK_S: Final = (
    1.0  # what is left of the wait for the answer to a question that is granted at the last moment
)


class GivingWay:
    """Asks for what is queued, the oldest first, until it gave way or is being written.

    Args:
        link: The client's dealings with the daemon.
        now: When the search began (monotonic seconds).
        wait_s: How long it will go on; afterwards nothing gives way any more. 0: for an answer and no longer.
    """

    def __init__(self, link: DaemonLink, now: float, wait_s: float) -> None:
        wait_s = wait_s or _ANSWER_S
        self._link, self._ends_at = link, now + wait_s
        self._until = self._ends_at - min(_WAY_BACK_S, wait_s / 2)
        self._question: int | None = None
        self._asked_at: float | None = None

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def is_open(self, now: float) -> bool:
        """Whether an answer is still to come. A slot may be seen to be free before it: what gave way is said with it."""
        if self._question is None or self._asked_at is None or self._link.answered(self._question):
            return False
        return now < min(self._ends_at, self._asked_at + _ANSWER_S)

    def may_come(self, now: float) -> bool:
        """Whether a slot may be given up soon; asks, or asks again, when the last answer is there."""
        if self._question is not None and not self._link.answered(self._question):
            return self.is_open(now)
        waiting = (staged for staged in self._link.outbox.staged if staged.ticket.waits)
        oldest = next(waiting, None)
        if oldest is None or now > self._until:
            return False
        # It was about to be written, or all of its stream was sent and not taken in yet: a moment later it can be told.
        if self._asked_at is None or now - self._asked_at >= _AGAIN_S:
            self._question, self._asked_at = self._link.ask_to_give_way(oldest, self._until), now
        return self._question is not None
