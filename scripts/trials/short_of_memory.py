"""A process that may take little more memory than it has: what it asks the system for is refused, and it isn't killed."""

from __future__ import annotations

import contextlib
import random
import resource
from pathlib import Path
from typing import Final

#: Limits, and what /proc/PID/status says that they bound.
_LIMITS: Final = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
_MORE_BYTES: Final = (0, 4096, 2**17, 2**20, 2**22, 2**24)


def limit(pid: int, chance: random.Random) -> str:
    """Limit it at random; in words."""
    kind, what = chance.choice(_LIMITS)
    more = chance.choice(_MORE_BYTES)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError, KeyError):
        resource.prlimit(pid, kind, (_bytes(pid, what) + more, resource.RLIM_INFINITY))
    return f"{what} + {more}"


def lift(pid: int) -> None:
    """It may take what it likes again."""
    with contextlib.suppress(ProcessLookupError):
        for kind, _ in _LIMITS:
            resource.prlimit(pid, kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _bytes(pid: int, what: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines if ":" in line)[what].split()[0]) * 1024
