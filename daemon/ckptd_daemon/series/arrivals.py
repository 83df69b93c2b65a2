"""Checkpoints that somebody has put into a run, and that may still be being copied: they are left alone for a while.

One that this daemon wrote, or has seen whole, was damaged if it fails its check, and is moved to quarantine at once.
One that came from elsewhere may only not be all there yet, whatever pauses its copying makes; moved, the rest would be
copied to nowhere. It stays in place until it hasn't changed for long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

from ckptd.disk.series_entries import Entry

#: By the monotonic clock, from look to look; what an mtime says counts for nothing.
STILL_FOR_S: Final = 300.0


class Arrivals:
    """Of one run. Used by the disk's thread.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._whole: dict[str, str] = {}  # name → its folder's inode
        self._failed: dict[str, tuple[str, float]] = {}  # name → what failed, since when

    def whole(self, entry: Entry) -> None:
        """It was written here, or is all there."""
        self._whole[entry.name] = _inode(entry)
        self._failed.pop(entry.name, None)

    def found(self, entry: Entry, *, marked: bool) -> None:
        """It was there at the start; marked: it was verified once."""
        if marked or _has_all_bytes(entry):
            self.whole(entry)

    def failed(self, entry: Entry, signature: str) -> None:
        """It failed its check with these files."""
        before = self._failed.get(entry.name)
        if before is None or before[0] != signature:
            self._failed[entry.name] = signature, self._now()

    def left(self, names: Iterable[str]) -> None:
        """They are gone: one that comes by such a name again is another one, though it may have the inode."""
        for name in names:
            self._whole.pop(name, None)
            self._failed.pop(name, None)

    def may_move(self, entry: Entry) -> bool:
        """Whether one that failed, and hasn't changed since, isn't being copied any more."""
        if self._whole.get(entry.name) == _inode(entry):
            return True
        failed = self._failed.get(entry.name)
        return failed is not None and self._now() - failed[1] >= STILL_FOR_S


def _inode(entry: Entry) -> str:
    return entry.identity.partition(" ")[0]


def _has_all_bytes(entry: Entry) -> bool:
    """Whether each file that its index names has the length that it says: no copy has come half-way."""
    index = entry.index
    if index is None:
        return False
    sizes = {shard.path: shard.bytes for shard in index.shards}
    with contextlib.suppress(OSError):
        return all((entry.path / path).lstat().st_size == size for path, size in sizes.items())
    return False
