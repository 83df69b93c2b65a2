"""The snapshots a client has left out, and which of them the daemon still has to hear of.

It can't know of them by itself: nothing of them was ever sent. A daemon that comes later is told the whole count.
"""

from __future__ import annotations

from ckptd.limits import MAX_SKIPPED, MAX_SKIPPED_TOLD
from ckptd.link.wire import Skipped

__all__ = ["SkippedSteps"]


class SkippedSteps:
    """One client's. Not safe for use by several threads at once.

    Args:
        client_id: 32 hex digits.
        gave_way: They were taken, and gave way before they were sent.
    """

    def __init__(self, client_id: str, *, gave_way: bool = False) -> None:
        self._client_id, self._gave_way = client_id, gave_way
        self._count = self._told = 0
        self._untold: list[int] = []  # steps of the newest; of more only the count is told
        self._under_way: tuple[int, int] | None = None  # message, the count in it

    def add(self, step: int) -> None:
        """One more was left out."""
        self._count = min(self._count + 1, MAX_SKIPPED)
        self._untold = [*self._untold, step][-MAX_SKIPPED_TOLD:]

    def due(self, *, at_last: bool = False) -> Skipped | None:
        """What to tell now: one message at a time, so that a tight loop doesn't fill the connection.

        Args:
            at_last: Tell all, even while an answer is missing: there is no later.
        """
        if self._told >= self._count or (self._under_way is not None and not at_last):
            return None
        return Skipped(
            id=0, client_id=self._client_id, count=self._count, gave_way=self._gave_way, steps=self._untold
        )

    def sent(self, message: int) -> None:
        """What was due has been sent under this number."""
        self._under_way = message, self._count

    def answered(self, message: int) -> None:
        """The daemon has answered a message; another one's answer changes nothing."""
        if self._under_way is not None and self._under_way[0] == message:
            self._told, self._under_way = self._under_way[1], None
            self._untold = self._untold[-(self._count - self._told) :] if self._told < self._count else []

    def forgotten(self) -> None:
        """Another daemon answers now: it has heard of none."""
        self._told, self._under_way = 0, None
