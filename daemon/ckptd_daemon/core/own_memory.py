"""Whether this process's own memory grows without bound, and who is cut off then.

libzmq keeps all parts of a message until the last has come. It bounds how long each is, not how many there are, and
nothing is told of them before: the only sign of an endless message is that this process grows. Then all connections
are cut, which frees what had come of unfinished messages; honest clients attach again by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ckptd.limits import MIB

__all__ = ["OwnMemory"]

log = logging.getLogger(__name__)

MOST_GROWTH_BYTES: Final = 1024 * MIB  #: far more than the descriptors of many runs take
_LOOK_EVERY_S: Final = 0.25
_GIVE_BACK_S: Final = 1.0  #: for what was cut off to be freed, by a thread of libzmq's
_PAUSE_S: Final = 0.05


def own_bytes() -> int:
    """Resident memory that is neither a file's nor shared. 0 where that can't be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back() -> None:
    """Have the C library give freed memory back, where it can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class OwnMemory:
    """Of the loop's thread, which it holds up for a second at most, and only when connections are cut.

    Args:
        cut_off: Cuts all connections; returns how many.
        most_growth_bytes: More than at the first look.
        own_bytes: What this process has of its own.
        give_back: Has freed memory given back to the system: until then it counts as this process's.
        now: A monotonic clock in seconds.
    """

    def __init__(
        self, cut_off: Callable[[], int], *, most_growth_bytes: int = MOST_GROWTH_BYTES,
        own_bytes: Callable[[], int] = own_bytes, give_back: Callable[[], None] = give_back,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._cut_off, self._most_growth = cut_off, most_growth_bytes
        self._own_bytes, self._give_back, self._now = own_bytes, give_back, now
        self._most: int | None = None
        self._has_cut = False
        self._looked_at = now() - _LOOK_EVERY_S

    def look(self) -> None:
        """Called again and again; looks a few times a second."""
        if self._now() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = self._now()
        if self._has_cut:  # what was freed since
            self._give_back()
            self._has_cut = False
        own = self._own_bytes()
        if self._most is None:
            self._most = own + self._most_growth
        elif own > self._most:
            self._cut(own, self._most)

    def _cut(self, own: int, most: int) -> None:
        count, self._has_cut = self._cut_off(), True
        log.warning("memory.connections_cut count=%d bytes=%d allowed=%d", count, own, most)
        until = self._now() + _GIVE_BACK_S
        while (left := self._after_giving_back()) > most and self._now() < until:
            time.sleep(_PAUSE_S)
        if left > most:  # something else needs it: cutting again would help nobody
            log.warning("memory.needed bytes=%d", left)
            self._most = left + self._most_growth

    def _after_giving_back(self) -> int:
        self._give_back()
        return self._own_bytes()
