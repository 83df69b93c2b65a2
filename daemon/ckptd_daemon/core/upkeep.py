"""When a run's retention and index are due: after every commit and every verdict, as long as that costs little.

It does as long as the kernel tells what others do to the run's folder. Where its names had to be gone through, and
there are more than 500, the next time is at most once in as many milliseconds as there are names, which is a
twentieth of the disk thread's time: commits wait behind it. What is owed meanwhile is done then. The index is a cache,
and retention only removes: neither is needed sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

AT_ONCE_UP_TO: Final = 500
_PAUSE_S_PER_NAME: Final = 0.001
_AFTER_A_FAILURE_S: Final = 10.0


class Upkeep:
    """What is owed to which run. Of the disk's thread; only `due` may be asked from another.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._owed: dict[str, bool] = {}
        self._not_before: dict[str, float] = {}
        self._again_at: dict[str, float] = {}

    def owe(self, run: str, *, retention: bool) -> bool:
        """The run's index is old now, and retention may have something to remove. Whether that is due already."""
        self._owed[run] = self._owed.get(run, False) or retention
        return self._is_due(run)

    def due(self) -> list[str]:
        """The runs to which something is owed and due."""
        runs = [run for run in tuple(self._owed) if self._is_due(run)]
        return [run for run in runs if self._now() >= self._again_at.get(run, 0.0)]

    def begin(self, run: str) -> bool:
        """It is done now; whether retention is owed too."""
        self._again_at.pop(run, None)
        return self._owed.pop(run, False)

    def failed(self, run: str, *, retention: bool) -> None:
        """It could not be done: it is owed still, and tried again with the next commit or in a while."""
        self._owed[run] = self._owed.get(run, False) or retention
        self._again_at[run] = self._now() + _AFTER_A_FAILURE_S

    def end(self, run: str, listed: int, *, more: bool) -> None:
        """It was done, and so many names were gone through for it; more: retention has left some to remove."""
        if more:  # in the next job: a commit that waits goes first
            self._owed[run] = True
        elif listed > AT_ONCE_UP_TO:
            self._not_before[run] = self._now() + listed * _PAUSE_S_PER_NAME
            return
        self._not_before.pop(run, None)

    def _is_due(self, run: str) -> bool:
        return self._now() >= self._not_before.get(run, 0.0)
