"""Reading a file from the medium rather than from the page cache, so that a hash says what the disk holds.

Just after a commit the cache still holds what was written: hashing that proves nothing. O_DIRECT goes round
the cache. Where a file system has none, the cached pages are dropped (POSIX_FADV_DONTNEED), which skips dirty
and mapped pages without a word, so their residency is looked up afterwards. The answer says which it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Literal

from ckptd.disk.read_buffers import BUFFER_BYTES, buffer_pair
from ckptd.memory_calls import map_at, residency, unmap

How = Literal["direct", "dontneed", "cached"]

_SMALL_BYTES: Final = BUFFER_BYTES  #: up to here a second thread costs more than it hides


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
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if _set_flags(fd, flags | os.O_DIRECT):
            try:
                return (yield from _hash(fd, size, tell)), size, "direct"
            except _NotDirect:
                pass  # the file system accepts the flag but not the read
            finally:
                _set_flags(fd, flags)
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


class _NotDirect(Exception):
    """The first direct read was refused."""


def _silent(_count: int) -> None:
    pass


def _set_flags(fd: int, flags: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return True


def _hash(fd: int, size: int, tell: Callable[[int], None]) -> Generator[None, None, str]:
    """Read into two page-aligned buffers in turn, one being filled while the other is hashed."""
    digest = hashlib.sha256()
    with buffer_pair() as buffers:
        if size <= _SMALL_BYTES:
            count = _read_at(fd, buffers[0], 0, size)
            digest.update(buffers[0][:count])
            tell(count)
            return digest.hexdigest()
        with _Reader() as reader:
            pending = reader.submit(fd, buffers[0], 0, size)
            at = turn = 0
            while at < size:
                count = pending.result()
                full = buffers[turn]
                at += count
                turn = 1 - turn
                if at < size:
                    pending = reader.submit(fd, buffers[turn], at, size)
                digest.update(full[:count])
                tell(count)
                yield
    return digest.hexdigest()


class _Reader:
    """A thread that reads ahead, at the priority of the thread that wants it: another one when another wants it."""

    def __init__(self) -> None:
        self._begin()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._thread.shutdown()

    def submit(self, fd: int, buffer: memoryview, at: int, size: int) -> Future[int]:
        """Have a block read; the one before has been."""
        if self._wanted_by != threading.get_ident():
            self._thread.shutdown()
            self._begin()
        return self._thread.submit(_read_at, fd, buffer, at, size)

    def _begin(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckptd-read")
        self._wanted_by = threading.get_ident()


def _read_at(fd: int, buffer: memoryview, at: int, size: int) -> int:
    """Fill the buffer, or up to the end of the file: a short read in the middle is continued."""
    wanted = min(len(buffer), size - at)
    got = 0
    while got < wanted:
        try:
            count = os.preadv(fd, [buffer[got:]], at + got)
        except OSError as error:
            if error.errno == errno.EINVAL and at == got == 0:
                raise _NotDirect from error
            raise
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        got += count
    return wanted


def _drop_cache(fd: int, size: int) -> bool:
    """Drop the file's cached pages; whether none is left in memory."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return size == 0 or not _any_resident(fd, size)


def _any_resident(fd: int, size: int) -> bool:
    """Whether the page cache holds any page of the file (mincore); True when that can't be told."""
    address = map_at(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd)
    if address is None:
        return True
    try:
        pages = residency(address, -(-size // mmap.PAGESIZE), mmap.PAGESIZE)
        return pages is None or any(map((1).__and__, pages))
    finally:
        unmap(address, size)
