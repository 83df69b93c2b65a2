"""When the scrub may read on: for a bounded share of the time, and never while somebody else reads or writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

#: How long it reads at a stretch, and how many times as long it rests after that: it has an eighth of the disk's time, and
#: where one piece takes longer than a stretch a quarter, for the next one is read ahead.
STRETCH_S: Final = 0.1
RESTS: Final = 7
_LOOK_S: Final = 1.0  #: so often whoever waits looks whether it is still needed


class GivenUp(Exception):
    """What was being read isn't needed any more."""


class Turn:
    """Of one thread that reads in small pieces. Others say from theirs that they are at work.

    Args:
        now: A monotonic clock in seconds.
        wait: Waits on a condition for so many seconds at most.
    """

    def __init__(
        self, now: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:  # fmt: skip
        self._now, self._wait, self._changed = now, wait, threading.Condition()
        self._others: set[str] = set()
        self._began = now()

    def __repr__(self) -> str:
        return f"<Turn {'of ' + ', '.join(sorted(self._others)) if self._others else 'free'}>"

    def others(self, who: str, at_work: bool) -> None:
        """Say that somebody is at work, or no longer."""
        with self._changed:
            (self._others.add if at_work else self._others.discard)(who)
            self._changed.notify_all()

    def begin(self) -> None:
        """The thread begins to read something: returns once nobody else is at work."""
        self._rest(0.0, lambda: True)

    def end_of_piece(self, needed: Callable[[], bool]) -> None:
        """After each piece: returns when the next may be read.

        Raises:
            GivenUp: It is no longer needed.
        """
        if not needed():
            raise GivenUp
        worked_s = self._now() - self._began
        if worked_s >= STRETCH_S or self._others:
            self._rest(worked_s, needed)

    def end(self) -> None:
        """All of it is read: it rests for that too, however little it was."""
        self._rest(self._now() - self._began, lambda: True)

    def _rest(self, worked_s: float, needed: Callable[[], bool]) -> None:
        with self._changed:
            until = self._now() + RESTS * worked_s
            while self._others or self._now() < until:
                self._wait(self._changed, _LOOK_S if self._others else min(_LOOK_S, until - self._now()))
                if not needed():
                    raise GivenUp
            self._began = self._now()
