"""How one writer writes: the mode of its root, who waits, and how fast it may."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final, cast

from ckptd.disk.priority import Urgency
from ckptd.disk.write_mode import Mode, WriteMode
from ckptd.disk.write_rate import WriteRate
from ckptd.limits import LARGE_FROM_BYTES

_MODE_ENV: Final = "CKPTD_WRITE_MODE"
_MOST_WRITERS: Final = 8
_MOST_HASHERS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """What all snapshots of one root have in common; shared by all threads.

    Where the environment says CKPTD_WRITE_MODE=direct, early or plain, every file is written like a large one in that
    mode; only tests do.

    Attributes:
        mode: Of large files. Default: found out at the first one.
        urgency: Whether somebody waits. Default: always, so that all is done at normal priority.
        rate: Bound of bytes per second. Default: none.
        large_from_bytes: Files from this size on are written in that mode, with their hash in other threads.
    """

    mode: WriteMode = field(default_factory=lambda: WriteMode(_forced_mode()))
    urgency: Urgency = field(default_factory=Urgency)
    rate: WriteRate = field(default_factory=WriteRate)
    large_from_bytes: int = field(default_factory=lambda: LARGE_FROM_BYTES if _forced_mode() is None else 0)

    def writers(self, threads: int | None) -> int:
        """Files to write at once: two keep a device busy, more where they can copy beside each other."""
        return threads or max(2, min(_cores(), _MOST_WRITERS))

    def hashers(self, threads: int | None) -> int:
        """Files to hash at once."""
        return threads or min(_cores(), _MOST_HASHERS)

    def facts(self) -> dict[str, Any]:
        """As `ckptd status` shows it."""
        return {
            "mode": self.mode.now, "reason": self.mode.reason, "max_bytes_per_s": self.rate.bytes_per_s,
            "urgent": self.urgency.now,
        }  # fmt: skip


def _forced_mode() -> Mode | None:
    mode = os.environ.get(_MODE_ENV)
    return cast(Mode, mode) if mode in ("direct", "early", "plain") else None


def _cores() -> int:
    return len(os.sched_getaffinity(0))
