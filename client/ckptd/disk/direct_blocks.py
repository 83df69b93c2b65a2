"""A file's content as blocks for O_DIRECT: large aligned data as it lies in memory, the rest through a small buffer.

What a device reads by itself must begin and end at multiples of the sector size, in memory and in the file. Large
tensors do (`ckptd.limits.PAGE_ALIGNMENT`, in slots and in archives); headers, small tensors and odd ends between
them are put together in a buffer that does.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from typing import Final

from ckptd.disk.chunks import Chunk
from ckptd.limits import MIB, PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT

_GATHERED_BYTES: Final = 1 * MIB
_MOST_PARTS: Final = 512  # the kernel takes 1024 at once


class DirectBlocks:
    """The content, gone through once; a block must be written before the next is asked for.

    Each block is a list of buffers that lie one after the other in the file, all of them whole pages; the last
    block is filled up with zeros, so that the file has to be cut to `nbytes` afterwards.

    Args:
        segments: The content.
        block_bytes: About how large a block may be.

    Attributes:
        nbytes: Bytes of content so far.
    """

    def __init__(self, segments: Iterable[Chunk], block_bytes: int) -> None:
        self.nbytes = 0
        self._segments, self._block_bytes = segments, block_bytes
        self._memory = mmap.mmap(-1, min(_GATHERED_BYTES, block_bytes))
        self._gathered = memoryview(self._memory)
        self._from = self._to = 0  # of what is gathered and in no part yet
        self._parts: list[memoryview] = []
        self._in_parts = 0

    def __iter__(self) -> Iterator[list[memoryview]]:
        for segment in self._segments:
            view = memoryview(segment).cast("B")
            self.nbytes += len(view)
            while view:
                taken = self._as_it_lies(view) or self._gather(view)
                view = view[taken:]
                if self._full():
                    yield from self._flush()
        rest = -self._to % PAGE_ALIGNMENT
        self._gathered[self._to : self._to + rest] = bytes(rest)
        self._to += rest
        yield from self._flush()

    def _as_it_lies(self, view: memoryview) -> int:
        """Take the whole pages at the beginning of view, if it may be written from where it is."""
        if len(view) < PAGE_ALIGNED_FROM_BYTES or self._to % PAGE_ALIGNMENT or not _is_aligned(view):
            return 0
        self._part_of_gathered()
        count = min(len(view), self._block_bytes - self._in_parts) // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        self._add(view[:count])
        return count

    def _gather(self, view: memoryview) -> int:
        count = min(len(view), len(self._gathered) - self._to)
        self._gathered[self._to : self._to + count] = view[:count]
        self._to += count
        return count

    def _full(self) -> bool:
        size = self._in_parts + self._to - self._from
        return (
            size >= self._block_bytes - PAGE_ALIGNMENT
            or self._to == len(self._gathered)
            or len(self._parts) >= _MOST_PARTS
        )

    def _add(self, part: memoryview) -> None:
        self._parts.append(part)
        self._in_parts += len(part)

    def _part_of_gathered(self) -> None:
        whole = self._to // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        if whole > self._from:
            self._add(self._gathered[self._from : whole])
            self._from = whole

    def _flush(self) -> Iterator[list[memoryview]]:
        """All whole pages as a block; once that is written, the odd end moves to the beginning of the buffer."""
        self._part_of_gathered()
        block, self._parts, self._in_parts = self._parts, [], 0
        if block:
            yield block
        rest = bytes(self._gathered[self._from : self._to])
        self._gathered[: len(rest)] = rest
        self._from, self._to = 0, len(rest)


def _is_aligned(view: memoryview) -> bool:
    """Whether view begins at a page; of memory that can't be written to it can't be told."""
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE_ALIGNMENT == 0
