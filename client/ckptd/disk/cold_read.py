"""Reading a file of which the page cache holds little: round it, through a pair of buffers, hashed there and copied on.

Through the page cache a cold file takes longer: the kernel reads it in smaller pieces, and its bytes cross the memory
once more. One that is in memory already is read from there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Final

from ckptd.disk.read_ahead import pieces_ahead
from ckptd.disk.read_buffers import BUFFER_BYTES
from ckptd.disk.reader import Span
from ckptd.memory_calls import mapped, residency

__all__ = ["filled", "is_cold", "pieces_into"]

_LOOKED_AT: Final = 32  #: pages of a file, evenly spread
#: What torchrun, srun and mpirun say of how many processes of a job are on this node: they restore the same files, and
#: of all but one that finds them in the page cache.
_RANKS_HERE: Final = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def is_cold(fd: int, size: int) -> bool:
    """Whether reading a file round the page cache is worth it: it is large, little of it is there, and no other process of
    the job on this node wants it there. What can't be told is taken for no."""
    if size <= BUFFER_BYTES or any(os.environ.get(name, "1") != "1" for name in _RANKS_HERE):
        return False
    with mapped(fd, size) as address:
        if address is None:
            return False
        pages = -(-size // mmap.PAGESIZE)
        step = -(-pages // _LOOKED_AT)
        seen = [residency(address + page * mmap.PAGESIZE, 1, mmap.PAGESIZE) for page in range(0, pages, step)]
        return 2 * sum(one is None or bool(one[0] & 1) for one in seen) < len(seen)


def pieces_into(fd: int, spans: Sequence[Span], size: int, at: int = 0) -> Iterator[memoryview]:
    """Read the file from `at` on, its spans into their memory; its bytes, piece by piece, in their order.

    Args:
        fd: Open for reading, with O_DIRECT.
        spans: Ascending, without overlap, from `at` on. Filled in this order.
        size: Of the file.
        at: A multiple of 4096.

    Raises:
        NotDirect: Nothing was read, and no span was begun.
        EOFError, OSError: As for pieces_ahead.
    """
    filling = _Filling(spans)
    for piece in pieces_ahead(fd, size, at):
        yield piece
        filling.take(piece, at)
        at += len(piece)


def filled(spans: Sequence[Span], head: memoryview) -> Sequence[Span]:
    """Put the first bytes of a file into its spans; what of them is still to be read."""
    if not head:
        return spans
    filling = _Filling(spans)
    filling.take(head, 0)
    return filling.rest(len(head))


class _Filling:
    """Spans that get their bytes from pieces of the file, one after the other."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = iter(spans)
        self._span: Span | None = None
        self._next()

    def _next(self) -> None:
        self._span, self._begun = next(self._spans, None), False

    def take(self, piece: memoryview, at: int) -> None:
        """The piece is what the file holds at `at`."""
        end, start = at + len(piece), _address(piece)
        while (span := self._span) is not None and span.offset < end:
            if not self._begun:
                self._begun = True
                if span.begin is not None:
                    span.begin()
            low, high = max(at, span.offset), min(end, span.offset + span.into.nbytes)
            if low < high:
                to = _address(span.into) + low - span.offset
                ctypes.memmove(to, start + low - at, high - low)  # without the GIL
            if high < span.offset + span.into.nbytes:
                return
            if span.done is not None:
                span.done()
            self._next()

    def rest(self, at: int) -> list[Span]:
        """What isn't filled once all before `at` is; the first one may have begun."""
        if (span := self._span) is None:
            return []
        if self._begun:
            span = Span(at, span.into[at - span.offset :], done=span.done)
        return [span, *self._spans]


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
