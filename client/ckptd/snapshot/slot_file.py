"""The file of a slot: opened only when it can be one, a private regular file of ours."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ckptd.errors import ProtocolError
from ckptd.limits import PAGE_ALIGNMENT

__all__ = ["open_slot_file"]


def open_slot_file(path: Path, mode: int) -> tuple[int, int]:
    """The descriptor and size of a slot's file, opened with O_RDWR or O_RDONLY; raises as Slot.open."""
    try:
        fd = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise ProtocolError("not a slot", where=str(path), seen=error.strerror or "") from error
        raise
    try:
        found = os.fstat(fd)
        _check_file(path, found)
    except BaseException:
        os.close(fd)
        raise
    return fd, found.st_size


def _check_file(path: Path, found: os.stat_result) -> None:
    seen = ""
    if not stat.S_ISREG(found.st_mode):
        seen = "not a regular file"
    elif found.st_uid != os.geteuid():
        seen = f"owner {found.st_uid}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        seen = f"mode {stat.S_IMODE(found.st_mode):04o}"
    elif found.st_size < 2 * PAGE_ALIGNMENT or found.st_size % PAGE_ALIGNMENT:
        seen = f"{found.st_size} bytes"
    if seen:
        raise ProtocolError(
            "not a slot", where=str(path), seen=seen, wanted=f"a private regular file of user {os.geteuid()}"
        )
