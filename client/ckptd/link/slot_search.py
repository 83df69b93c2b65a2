"""How a snapshot gets a free slot: there is one, one is made, an older snapshot gives way, or one comes free in time."""

from __future__ import annotations

import time
from typing import Final

from ckptd.errors import RootMoved, TimedOut
from ckptd.link.daemon_link import DaemonLink
from ckptd.link.giving_way import GivingWay
from ckptd.link.headroom import with_headroom
from ckptd.snapshot.slots import Slot

__all__ = ["NO_NEWS_S", "SlotSearch"]

NO_NEWS_S: Final = 1.0  #: bound of a snapshot's wait after one in which the daemon said nothing at all

_SLICE_S: Final = 0.05  # how long one look waits
_GROW_EVERY_S: Final = 1.0  # a daemon whose slots don't fit isn't asked more often than this


class SlotSearch:
    """One client's, one search after the other.

    Args:
        link: The client's dealings with the daemon.
        start_timeout_s: A search waits no longer than this for a daemon that is gone.
        gives_way: Whether an older snapshot that isn't being written yet gives way where no slot is free.
    """

    def __init__(self, link: DaemonLink, *, start_timeout_s: float, gives_way: bool) -> None:
        self._link, self._start_timeout_s, self._gives_way = link, start_timeout_s, gives_way
        self._silent_at: float | None = None

    def obtain(self, size: int, timeout_s: float) -> Slot:
        """A free slot of at least `size` bytes, waiting at most `timeout_s` for what is being written.

        Raises:
            TimedOut, NoDaemon: None came free within the bound.
            RootMoved: None is free, and no daemon is to be had.
            SharedMemoryTooSmall, OverBudget: None can be large enough.
        """
        link, started = self._link, time.monotonic()
        silent = self._silent_at is not None and link.session.last_heard <= self._silent_at
        if silent:  # the bound is paid once per silence, not at every snapshot
            timeout_s = min(timeout_s, NO_NEWS_S)
        way = GivingWay(link, started, timeout_s) if self._gives_way and not silent else None
        grow_at = started
        slot = link.find_free(size)  # its header says so by itself; without one there may be news
        if slot is None:
            link.look(0.0)
        while slot is None and (slot := link.find_free(size)) is None:
            now = time.monotonic()
            left_s = max(0.0, started + timeout_s - now)
            if not link.session.connected:
                link.session.attach(min(left_s, self._start_timeout_s))
                link.greet()
            elif now >= grow_at and link.must_grow(size):
                grow_at = now + _GROW_EVERY_S
                link.reserve(with_headroom(size, grew=True), max(left_s, NO_NEWS_S))
                continue
            elif way is not None and way.may_come(now):
                link.look(_SLICE_S)
                continue
            self._check(started, timeout_s, asked=way is not None and way.asked)
            link.hurry()
            link.look(min(_SLICE_S, left_s))
        while way is not None and way.is_open(time.monotonic()):
            link.look(_SLICE_S)
        self._silent_at = None
        return slot

    def _check(self, started: float, timeout_s: float, *, asked: bool) -> None:
        """Raise once the bound is over."""
        link, now = self._link, time.monotonic()
        if not link.session.connected:
            moved = isinstance(link.session.trouble, RootMoved)  # no daemon is started there
            if moved or now - started >= min(timeout_s, self._start_timeout_s):
                raise link.no_daemon()
        if now - started < timeout_s:
            return
        if (timeout_s > 0 or asked) and link.session.last_heard < started:
            self._silent_at = now
        count = len(link.outbox)
        raise TimedOut(
            f"no slot came free within {timeout_s:.3g} s" if timeout_s > 0 else "no slot is free",
            seen=f"{count} snapshot{'' if count == 1 else 's'} still to be written",
            todo="save less often, wait() before one that must not be left out, or look at: ckptd status",
        )  # fmt: skip
