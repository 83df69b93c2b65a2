"""What another process has now: open files, children. One that works opens and closes, starts and ends meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_files(pid: int) -> list[str]:
    """Where its descriptors lead, those left out that it closed while they were looked at."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(fd))
    return found


def children_of(pid: int) -> list[int]:
    """The processes that it has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found += map(int, (task / "children").read_text().split())
    return found
