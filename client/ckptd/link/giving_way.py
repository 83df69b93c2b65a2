"""One snapshot() that finds no free slot: which of the client's older snapshots gives way to it.

Only the daemon may free a slot that it has accepted, and it may begin to write it at any moment: so it is asked.
"""

from __future__ import annotations

from typing import Final

from ckptd.link.daemon_link import DaemonLink

__all__ = ["GivingWay"]

_ANSWER_S: Final = 2.0  # bound of the wait for one answer: the daemon's loop waits for nothing
_AGAIN_S: Final = 0.02  # what the daemon hasn't accepted yet is asked for again after so long


class GivingWay:
    """Asks for each queued snapshot once it is accepted, the oldest first.

    Args:
        link: The client's dealings with the daemon.
    """

    def __init__(self, link: DaemonLink) -> None:
        self._link = link
        self._tried: set[int] = set()
        self._first_asked: dict[int, float] = {}
        self._question: int | None = None
        self._asked_at = 0.0

    @property
    def asked(self) -> bool:
        return bool(self._first_asked)

    def is_open(self, now: float) -> bool:
        """Whether an answer is still to come. A slot may be seen to be free before it: what gave way is said with it."""
        asked = self._question is not None and not self._link.answered(self._question)
        return asked and now - self._asked_at < _ANSWER_S

    def may_come(self, now: float) -> bool:
        """Whether a slot may be given up soon; asks for the next one when the last answer is there.

        What is being written, and what the daemon hasn't answered for in time, doesn't give way.
        """
        if self._question is not None and not self._link.answered(self._question):
            return self.is_open(now)
        waiting = (staged for staged in self._link.outbox.staged if staged.ticket.waits)
        oldest = next((staged for staged in waiting if staged.ticket.snapshot not in self._tried), None)
        if oldest is None:
            return False
        snapshot = oldest.ticket.snapshot
        since = self._first_asked.setdefault(snapshot, now)
        if now != since and now - self._asked_at < _AGAIN_S:
            return True
        # All of a stream may have been sent, and not be taken in yet: then the daemon hasn't heard of it.
        if oldest.ticket.sequence is not None or now - since >= _ANSWER_S:
            self._tried.add(snapshot)
        self._question, self._asked_at = self._link.ask_to_give_way(oldest), now
        return self._question is not None
