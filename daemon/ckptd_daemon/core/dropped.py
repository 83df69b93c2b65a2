"""Lines about messages that were dropped: a few, however many somebody sends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

SAY_EVERY_S: Final = 10.0


class Dropped:
    """Logs at most one line per kind and ten seconds; each says how many there were since the last one.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._unsaid: dict[str, int] = {}
        self._said_at: dict[str, float] = {}

    def note(self, kind: str, reason: str) -> None:
        """One message was dropped. Kinds are few and ours, never what somebody sent."""
        self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
        now = self._now()
        if now - self._said_at.get(kind, now - SAY_EVERY_S) < SAY_EVERY_S:
            return
        log.info("message.dropped kind=%s count=%d reason=%s", kind, self._unsaid.pop(kind), reason)
        self._said_at[kind] = now
