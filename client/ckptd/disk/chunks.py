"""A file's content as a stream of chunks of even size, and its SHA-256.

Content comes as segments: many small ones (archive headers, small tensors) and a few large ones. They
are joined and cut, so that writing and hashing take few calls and copy only what is small.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterable, Iterator
from itertools import takewhile
from typing import Final

from ckptd.limits import MIB

Chunk = bytes | bytearray | memoryview

_CHUNK_BYTES: Final = 4 * MIB


class HashBeside:
    """Hashes the segments in a thread of its own, so that the hash hides behind the write and its fsync.

    It reads the caller's buffer: one of the two methods must be called before that buffer may be reused.
    """

    def __init__(self, segments: Collection[Chunk]) -> None:
        self._stopped = threading.Event()
        self._digest: str | None = None
        self._thread = threading.Thread(target=self._run, args=(segments,), name="ckptd-hash", daemon=True)
        self._thread.start()

    def _run(self, segments: Collection[Chunk]) -> None:
        self._digest = sha256_of(takewhile(lambda _: not self._stopped.is_set(), even_chunks(segments)))

    def stop(self) -> None:
        """Give up."""
        self._stopped.set()
        self._thread.join()

    def hexdigest(self) -> str:
        """Wait for the end; SHA-256 in hex."""
        self._thread.join()
        if self._digest is None:
            raise RuntimeError("the hashing thread died")
        return self._digest


def sha256_of(chunks: Iterable[Chunk]) -> str:
    """SHA-256 of the chunks in order, in hex."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def take(chunks: Iterator[Chunk], at_least_bytes: int) -> list[Chunk]:
    """Take chunks until they hold at least so many bytes, or end."""
    taken: list[Chunk] = []
    count = 0
    for chunk in chunks:
        taken.append(chunk)
        count += len(chunk)
        if count >= at_least_bytes:
            break
    return taken


def even_chunks(segments: Iterable[Chunk]) -> Iterator[Chunk]:
    """Join small segments and cut large ones: few system calls, and no copy of the large ones."""
    small = bytearray()
    for segment in segments:
        view = memoryview(segment).cast("B")
        if len(view) < _CHUNK_BYTES // 16:
            small += view
            if len(small) >= _CHUNK_BYTES:
                yield small
                small = bytearray()
            continue
        if small:
            yield small
            small = bytearray()
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]
    if small:
        yield small
