"""A file's content as a stream of chunks of even size, and its SHA-256.

Content comes as segments: many small ones (archive headers, small tensors) and a few large ones. They
are joined and cut, so that writing and hashing take few calls and copy only what is small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from typing import Final

from ckptd.limits import MIB

Chunk = bytes | bytearray | memoryview

_CHUNK_BYTES: Final = 4 * MIB


def hash_steps(segments: Iterable[Chunk]) -> Generator[None, None, str]:
    """SHA-256 of the segments in order, in hex, a chunk with each step."""
    digest = hashlib.sha256()
    for chunk in even_chunks(segments):
        digest.update(chunk)
        yield
    return digest.hexdigest()


def even_chunks(segments: Iterable[Chunk], most_bytes: int = _CHUNK_BYTES) -> Iterator[Chunk]:
    """Join small segments and cut large ones: few system calls, and no copy of the large ones.

    Args:
        segments: The content.
        most_bytes: How large a cut one may be; no more than 4 MiB all the same.
    """
    most_bytes = min(most_bytes, _CHUNK_BYTES)
    small = bytearray()
    for segment in segments:
        view = memoryview(segment).cast("B")
        if len(view) < most_bytes // 16:
            small += view
            if len(small) >= most_bytes:
                yield small
                small = bytearray()
            continue
        if small:
            yield small
            small = bytearray()
        for start in range(0, len(view), most_bytes):
            yield view[start : start + most_bytes]
    if small:
        yield small
