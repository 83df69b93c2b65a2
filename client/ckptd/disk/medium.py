"""Reading a file from the medium rather than from the page cache, so that a hash says what the disk holds.

Just after a commit the cache still holds what was written: hashing that proves nothing. O_DIRECT goes round
the cache. Where a file system has none, the cached pages are dropped (POSIX_FADV_DONTNEED), which skips dirty
and mapped pages without a word, so their residency is looked up afterwards. The answer says which it was.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Generator
from typing import Literal

from ckptd.disk.read_ahead import NotDirect, direct, pieces_ahead
from ckptd.memory_calls import mapped, residency

How = Literal["direct", "dontneed", "cached"]


def hash_file(
    fd: int, *, uncached: bool, progress: Callable[[int], None] | None = None
) -> tuple[str, int, How]:
    """SHA-256 of a regular file from its beginning to its end; see `hashing`.

    Returns:
        As for hashing.
    """
    steps = hashing(fd, uncached=uncached, progress=progress)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: tuple[str, int, How] = done.value
            return result


def hashing(
    fd: int, *, uncached: bool, progress: Callable[[int], None] | None = None
) -> Generator[None, None, tuple[str, int, How]]:
    """SHA-256 of a regular file from its beginning to its end, in steps: between two another thread may take over.

    Args:
        fd: Open for reading; its offset doesn't matter and isn't moved.
        uncached: Read the medium if that is possible at all.
        progress: Told the number of bytes after each piece.

    Returns:
        The hash in hex, the number of bytes, and how they were read: "direct" and "dontneed" come from the
        medium, "cached" may come from memory.

    Raises:
        OSError: The medium can't be read, or the file became shorter meanwhile.
    """
    size = os.fstat(fd).st_size
    tell = progress or _silent
    if uncached:
        with direct(fd) as is_direct:
            if is_direct:
                with contextlib.suppress(NotDirect):  # the file system accepts the flag but not the read
                    return (yield from _hash(fd, size, tell)), size, "direct"
    how: How = "dontneed" if uncached and _drop_cache(fd, size) else "cached"
    return (yield from _hash(fd, size, tell)), size, how


def forget_cached(folder: int, name: str) -> None:
    """Have whoever reads this file of the open folder next read the medium, as far as the kernel does that.

    What is wrong with the file is for whoever reads it to say.
    """
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _silent(_count: int) -> None:
    pass


def _hash(fd: int, size: int, tell: Callable[[int], None]) -> Generator[None, None, str]:
    digest = hashlib.sha256()
    try:
        for piece in pieces_ahead(fd, size):
            digest.update(piece)
            tell(len(piece))
            yield
    except EOFError as error:
        raise OSError(errno.EIO, "the file became shorter while it was read") from error
    return digest.hexdigest()


def _drop_cache(fd: int, size: int) -> bool:
    """Drop the file's cached pages; whether none is left in memory."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return size == 0 or not _any_resident(fd, size)


def _any_resident(fd: int, size: int) -> bool:
    """Whether the page cache holds any page of the file (mincore); True when that can't be told."""
    with mapped(fd, size) as address:
        if address is None:
            return True
        pages = residency(address, -(-size // mmap.PAGESIZE), mmap.PAGESIZE)
        return pages is None or any(map((1).__and__, pages))
