"""A file's bytes in order, one piece read by a thread of its own while whoever asks works on the other.

Both go through a queue each: where every CPU is busy, as with hashing, what counts is how soon the thread that reads
gets to ask for the next piece. Measured, a checkpoint is read and hashed in three quarters of the time that a task and
its result for each piece take.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import threading
from collections.abc import Generator, Iterator

from ckptd.disk.read_buffers import BUFFER_BYTES, buffer_pair
from ckptd.disk.read_thread import ReadThread

__all__ = ["NotDirect", "direct", "pieces_ahead", "read_fully"]


class NotDirect(Exception):
    """The first read was refused: the file system took O_DIRECT and can't read in it."""


@contextlib.contextmanager
def direct(fd: int) -> Iterator[bool]:
    """Have an open file read round the page cache meanwhile; whether the file system takes the flag."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not _set_flags(fd, flags | os.O_DIRECT):
        yield False
        return
    try:
        yield True
    finally:
        _set_flags(fd, flags)


def pieces_ahead(fd: int, size: int, at: int = 0) -> Generator[memoryview, None, None]:
    """The bytes of a file from `at` up to `size`, piece by piece; each is there until the next is asked for.

    Another thread may ask for the next than did before: what is left is read at the priority of that one.

    Args:
        fd: Open for reading, with O_DIRECT or without; its offset doesn't matter and isn't moved.
        size: Of the file.
        at: Where to begin; with O_DIRECT a multiple of 4096.

    Raises:
        NotDirect: Nothing was read, from the beginning of the file.
        EOFError: The file ends before.
        OSError: It can't be read, or there is no memory.
    """
    with buffer_pair() as buffers:
        if size - at <= BUFFER_BYTES:  # a thread costs more than it hides
            if size > at:
                yield buffers[0][: read_fully(fd, buffers[0], at, size)]
            return
        ahead = _Ahead(fd, size, at, buffers)
        try:
            ahead.start()
            while at < size:
                buffer, count = ahead.next()
                yield buffer[:count]
                ahead.give_back(buffer)
                at += count
        finally:
            ahead.stop()


def _set_flags(fd: int, flags: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError:
        return False
    return True


class _Ahead:
    """Fills free buffers with what comes next, in a thread that the one which wants it has started.

    `stop` has to be called, whatever happened to `start`.
    """

    def __init__(self, fd: int, size: int, at: int, buffers: tuple[memoryview, memoryview]) -> None:
        self._fd, self._size, self._at = fd, size, at
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int] | BaseException] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._thread: ReadThread | None = None

    def start(self) -> None:
        """Where the system refuses a thread, who wants a piece reads it."""
        self._wanted_by, self._thread = threading.get_ident(), ReadThread(self._read_on)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def next(self) -> tuple[memoryview, int]:
        """A buffer, and how much of it is filled."""
        if self._thread is None and self._full.empty():
            self._read_next()
        full = self._full.get()
        if isinstance(full, BaseException):
            raise full
        return full

    def give_back(self, buffer: memoryview) -> None:
        """Have it filled with what comes next, at the priority of the calling thread."""
        if self._wanted_by != threading.get_ident():
            self.stop()
            self.start()
        self._free.put(buffer)

    def stop(self) -> None:
        """Read no more; no thread is in the buffers then. An interrupt (Ctrl-C) is raised after that."""
        if self._thread is None:
            return
        self._free.put(None)
        self._thread.end()
        self._thread, free, self._free = None, self._free, queue.SimpleQueue()
        while not free.empty():  # it may have ended by itself, or not begun, and not seen the word
            if (buffer := free.get()) is not None:
                self._free.put(buffer)

    def _read_on(self) -> None:
        try:
            while self._read_next():
                pass
        except BaseException as error:  # noqa: BLE001 - raised where the piece is wanted
            self._full.put(error)

    def _read_next(self) -> bool:
        """Fill the next free buffer; False when there is nothing more to read, or no more is wanted."""
        if self._at >= self._size or (buffer := self._free.get()) is None:
            return False
        count = read_fully(self._fd, buffer, self._at, self._size)
        self._at += count
        self._full.put((buffer, count))
        return True


def read_fully(fd: int, buffer: memoryview, at: int, size: int) -> int:
    """Fill the buffer, or up to the end of the file: a short read in the middle is continued."""
    wanted = min(len(buffer), size - at)
    got = 0
    while got < wanted:
        try:
            count = os.preadv(fd, [buffer[got:]], at + got)
        except OSError as error:
            if error.errno == errno.EINVAL and at == got == 0:
                raise NotDirect from error
            raise
        if count == 0:
            raise EOFError
        got += count
    return wanted
