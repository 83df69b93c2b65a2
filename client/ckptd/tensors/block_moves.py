# ruff: noqa: TID253
"""A move of many bytes as one call that copies block after block, each of a size that the C library copies best.

Up to the size of a core's second-level cache glibc copies with the CPU's own string move, which doesn't read what it is
about to overwrite; from there on with plain stores, which do: measured, 108 MiB take 5.6 ms in one call, 4.8 in blocks.
A call for each block would need the interpreter's lock between any two, which a busy thread of the trainer may hold for
milliseconds. NumPy copies the rows of an array without it, one after the other.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy

__all__ = ["move_bytes"]

#: Whole pages, and less than the smallest second-level cache of a CPU that is told apart (512 KiB).
_BLOCK_BYTES: Final = 480 * 1024
#: By how much a row is longer than the distance to the next: rows in a row would be copied as one.
_OVERLAP_BYTES: Final = 64


def move_bytes(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another, without the interpreter's lock. The two ranges are apart."""
    rows = (nbytes - _OVERLAP_BYTES) // _BLOCK_BYTES
    if rows > 1:
        numpy.copyto(_rows(to, rows), _rows(source, rows))
        done = rows * _BLOCK_BYTES + _OVERLAP_BYTES
        to, source, nbytes = to + done, source + done, nbytes - done
    ctypes.memmove(to, source, nbytes)


def _rows(address: int, count: int) -> Any:
    return numpy.asarray(_Rows(address, count))


class _Rows:
    """Memory as NumPy is told of it; it keeps nothing alive."""

    def __init__(self, address: int, count: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count, _BLOCK_BYTES + _OVERLAP_BYTES),
            "strides": (_BLOCK_BYTES, 1),
            "typestr": "|u1",
            "version": 3,
        }
