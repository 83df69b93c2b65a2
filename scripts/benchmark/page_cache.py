"""Files out of the page cache, and the proof that they are."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def files_of(path: Path) -> list[Path]:
    """The file itself, or all files below the folder."""
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def drop(paths: Iterable[Path]) -> None:
    """Sync the files and drop their pages.

    Raises:
        RuntimeError: Pages are left: what reads them now is no cold read.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if left := resident_pages(fd):
                raise RuntimeError(f"{path.name}: {left} pages are still in memory")
        finally:
            os.close(fd)


def warm(paths: Iterable[Path]) -> None:
    """Read the files once, so that all of them are in memory."""
    buffer = bytearray(4 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident_pages(fd: int) -> int:
    """How many pages of the file are in the page cache (mincore)."""
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if _libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(map((1).__and__, pages.raw))
    finally:
        _libc.munmap(address, size)


def sync_file_system(folder: Path) -> None:
    """Have everything written that the file system still holds back (syncfs)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        _libc.syncfs(fd)
    finally:
        os.close(fd)
