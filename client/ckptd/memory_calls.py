"""Calls of the C library about memory that Python has no way to ask for. These let go of the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Final

__all__ = ["FIXED", "NO_ACCESS", "advise", "allocate_from_one_heap", "map_at", "mapped", "residency", "unmap"]

NO_ACCESS: Final = 0  #: PROT_NONE
FIXED: Final = 0x10  #: MAP_FIXED: what was mapped there is replaced

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_ARENA_MAX: Final = -8  # M_ARENA_MAX of mallopt(3)
_FAILED: Final = ctypes.c_void_p(-1).value


def map_at(address: int | None, size: int, access: int, flags: int, fd: int = -1) -> int | None:
    """mmap(2) from the beginning of the file, or without one.

    Args:
        address: Where to; None: wherever there is room.
        size: In bytes.
        access: mmap.PROT_READ and others, or NO_ACCESS.
        flags: mmap.MAP_SHARED and others; FIXED with an address.
        fd: The file.

    Returns:
        The address; None when it was refused.
    """
    mapped = _libc.mmap(address, size, access, flags, fd, 0)
    return None if mapped in (None, _FAILED) else int(mapped)


def unmap(address: int, size: int) -> None:
    """Take away what `map_at` gave."""
    _libc.munmap(address, size)


@contextlib.contextmanager
def mapped(fd: int, size: int) -> Iterator[int | None]:
    """A file mapped for reading meanwhile: the map's address; None when it was refused."""
    address = map_at(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd)
    try:
        yield address
    finally:
        if address is not None:
            unmap(address, size)


def advise(address: int, size: int, advice: int) -> bool:
    """madvise(2); whether it was taken."""
    return bool(_libc.madvise(address, size, advice) == 0)


def residency(address: int, pages: int, page_bytes: int) -> bytes | None:
    """mincore(2): a byte for each page of a map, its lowest bit set where the page is in memory; None if refused."""
    seen = ctypes.create_string_buffer(pages)
    return seen.raw if _libc.mincore(address, pages * page_bytes, seen) == 0 else None


def allocate_from_one_heap() -> None:
    """For a process of ours, before it has threads: by default glibc gives each of them a heap, and what one has let go
    of no other can use. Those that hold the GIL while they allocate don't get in each other's way in one.
    """
    with contextlib.suppress(AttributeError):  # a C library without it
        _libc.mallopt(_ARENA_MAX, 1)
