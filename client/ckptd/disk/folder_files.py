"""Opening what lies in a checkpoint folder: relative to the open folder, through no link, never blocking."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ckptd.errors import CorruptCheckpoint


def open_folder(path: Path | str) -> int:
    """A descriptor of folder path; a link to a folder is refused.

    Raises:
        FileNotFoundError: There is none.
        OSError: A link, no folder, no permission.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def open_file(folder: int, name: str, where: str) -> int:
    """A descriptor of the regular file `name` in the open folder.

    Raises:
        CorruptCheckpoint: A link, or no regular file.
        OSError: Missing, or can't be opened.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise CorruptCheckpoint("a link or a socket, not a file", where=where) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CorruptCheckpoint("not a regular file", where=where)
    except BaseException:
        os.close(fd)
        raise
    return fd


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors of what was only read; they are closed, whatever the system says."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def read_small_file(folder: int, name: str, where: str, max_bytes: int) -> bytes:
    """The content of regular file `name` in the open folder, if it isn't longer than max_bytes.

    Raises:
        CorruptCheckpoint: A link, no regular file, or too long.
        OSError: Missing, or can't be read.
    """
    fd = open_file(folder, name, where)
    try:
        with open(fd, "rb", closefd=False) as file:  # one that can't be made of fd doesn't close it
            size = _size(fd)  # read(n) asks for n bytes of memory at once
            data = file.read(min(size, max_bytes) + 1)
            if size < len(data) <= max_bytes:  # it has grown meanwhile
                data += file.read(max_bytes + 1 - len(data))
    finally:
        os.close(fd)
    if len(data) > max_bytes:
        raise CorruptCheckpoint("too long", where=where, wanted=f"at most {max_bytes} bytes")
    return data


def _size(fd: int) -> int:
    return os.fstat(fd).st_size
