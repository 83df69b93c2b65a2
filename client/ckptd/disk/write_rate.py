"""A bound on how fast data files are written, over all threads together: the rest of the disk is for others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from ckptd.errors import InvalidArgument
from ckptd.limits import MIB, PAGE_ALIGNMENT

#: Slower is refused: a snapshot would never be done.
SLOWEST_BYTES_PER_S: Final = 1_000_000
_FASTEST_BYTES_PER_S: Final = 2**62
#: So much of a second's bytes may be written at once.
_BURST_S: Final = 0.1
_LARGEST_BLOCK: Final = 8 * MIB


def check_rate(value: Any, where: str) -> int | None:
    """A bound in bytes per second, as given; None for 0 and for None: no bound.

    Raises:
        InvalidArgument: No such number, or slower than SLOWEST_BYTES_PER_S.
    """
    if value is None or (value == 0 and type(value) is int):
        return None
    if type(value) is not int or not SLOWEST_BYTES_PER_S <= value <= _FASTEST_BYTES_PER_S:
        raise InvalidArgument(
            "not a rate of writing", where=where, seen=repr(value)[:100],
            wanted=f"bytes per second, {SLOWEST_BYTES_PER_S} or more, or 0 for no bound",
        )  # fmt: skip
    return value


class WriteRate:
    """A token bucket. It holds also while somebody waits: it is a promise to the others who use the disk.

    Args:
        bytes_per_s: The bound; None for none.
        now: A monotonic clock in seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self, bytes_per_s: int | None = None, *,
        now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        self.bytes_per_s = bytes_per_s
        self._now, self._sleep = now, sleep
        self._paid_until = 0.0
        self._paying = threading.Lock()

    @property
    def block_bytes(self) -> int:
        """How much to write at once at most: whole pages, and short enough to keep the bound smooth."""
        if self.bytes_per_s is None:
            return _LARGEST_BLOCK
        burst = int(self.bytes_per_s * _BURST_S) // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        return min(_LARGEST_BLOCK, max(16 * PAGE_ALIGNMENT, burst))

    def take(self, nbytes: int) -> None:
        """Wait until so many more bytes may be written; threads that ask at once wait one after the other."""
        if self.bytes_per_s is None:
            return
        with self._paying:
            now = self._now()
            self._paid_until = max(self._paid_until, now - _BURST_S) + nbytes / self.bytes_per_s
            wait_s = self._paid_until - now
        if wait_s > 0:
            self._sleep(wait_s)
