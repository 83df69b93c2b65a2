"""In what pieces a file is read, so that each byte is read once: straight into place where that is large enough."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ckptd.disk.reader import Span
from ckptd.limits import MIB

_CHUNK_BYTES: Final = 4 * MIB
#: Ranges from this size on are read straight into place; smaller ones are cut out of a chunk.
_IN_PLACE_FROM_BYTES: Final = 1 * MIB


@dataclass(frozen=True, slots=True)
class Block:
    """A range read in one go: one large span, or small spans and what lies between them.

    Attributes:
        in_place: Whether it is one span, read straight into its memory.
    """

    start: int
    end: int
    spans: tuple[Span, ...]
    in_place: bool


def blocks(spans: Sequence[Span], size: int, at: int = 0) -> Iterator[Block]:
    """What to read, one after the other, to have a file of this size from `at` on and its spans in place."""
    small: list[Span] = []
    for span in spans:
        end = span.offset + span.into.nbytes
        large = span.into.nbytes >= _IN_PLACE_FROM_BYTES
        if small and (large or end - at > _CHUNK_BYTES):
            stop = small[-1].offset + small[-1].into.nbytes
            yield Block(at, stop, tuple(small), False)
            at, small = stop, []
        if not small and span.offset - at > _CHUNK_BYTES:
            yield Block(at, span.offset, (), False)
            at = span.offset
        if not large:
            small.append(span)
            continue
        yield Block(at, span.offset, (), False)
        yield Block(span.offset, end, (span,), True)
        at = end
    yield Block(at, size, tuple(small), False)


def read_block(fd: int, block: Block) -> Iterator[memoryview]:
    """Read it; its bytes, piece by piece, in their order. Raises EOFError where the file ends before."""
    if block.in_place:
        yield from fill(fd, block.spans[0])
        return
    if not block.spans:  # only hashed: any length, in bounded memory
        scratch = memoryview(bytearray(min(_CHUNK_BYTES, block.end - block.start)))
        for start in range(block.start, block.end, _CHUNK_BYTES):
            yield from _read_chunks(fd, start, scratch[: min(_CHUNK_BYTES, block.end - start)])
        return
    content = memoryview(bytearray(block.end - block.start))
    yield from _read_chunks(fd, block.start, content)
    for span in block.spans:
        start = span.offset - block.start
        if span.begin is not None:
            span.begin()
        span.into[:] = content[start : start + span.into.nbytes]
        if span.done is not None:
            span.done()


def fill(fd: int, span: Span) -> Iterator[memoryview]:
    """Read one span; its bytes, piece by piece. Raises EOFError where the file ends before."""
    if span.begin is not None:
        span.begin()
    yield from _read_chunks(fd, span.offset, span.into)
    if span.done is not None:
        span.done()


def _read_chunks(fd: int, offset: int, into: memoryview) -> Iterator[memoryview]:
    """Fill `into` from the file, chunk by chunk, so that each is hashed while it is in the CPU's cache."""
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done : done + _CHUNK_BYTES]], offset + done)
        if count == 0:
            raise EOFError
        yield into[done : done + count]
        done += count
