"""A disk whose files can't be read for a while: reading what lies under a folder fails with an errno."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def unreadable(errno: int, below: Path, *, name: str = "index.json") -> Iterator[None]:
    """Opening the files `name` (also relative to an open folder) below this folder fails with errno."""
    real = os.open

    def failing(path: Any, flags: int, *args: Any, dir_fd: int | None = None, **more: Any) -> int:
        folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        whole = Path(folder, os.fsdecode(path)) if not isinstance(path, int) else Path()
        reads = flags & os.O_ACCMODE == os.O_RDONLY
        if reads and whole.name == name and below in (whole.parent, *whole.parents):
            raise OSError(errno, os.strerror(errno), str(path))
        return real(path, flags, *args, dir_fd=dir_fd, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", failing)
        yield


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
