"""The beginning of a large file, read and hashed by a thread while whoever is to read the file is still busy with what
comes before.

What a restore checks before it may write anything keeps one CPU busy for as long as a quarter of the reading takes;
the disk and the other CPUs would be idle until then.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from ckptd.disk.cold_read import filled, is_cold
from ckptd.disk.read_ahead import NotDirect, direct, read_fully
from ckptd.disk.read_buffers import new_buffer
from ckptd.disk.read_thread import ReadThread
from ckptd.disk.reader import Span
from ckptd.limits import MIB

__all__ = ["HEAD_BYTES", "HeadStart"]

#: In one piece: a thread has to wait for the GIL after each, for as long as the one that holds it likes.
HEAD_BYTES: Final = 8 * MIB


class HeadStart:
    """The first HEAD_BYTES of a file, in memory that is given up when they are taken. `end` has to be called.

    Attributes:
        cold: Whether they are read round the page cache, as the rest is to be.
    """

    def __init__(self, fd: int, size: int, cpus: threading.Semaphore) -> None:
        """Once it was started nobody else may read from fd until `wait` has returned.

        Args:
            fd: Open for reading; its flags are changed meanwhile.
            size: Of the file; more than HEAD_BYTES.
            cpus: Taken while hashing. One CPU has to be left to the thread that goes on meanwhile: where all of them are
                busy hashing it waits for milliseconds, each time that it has let go of one.

        Raises:
            OSError: There is no memory.
        """
        self.cold, self._cpus = is_cold(fd, size), cpus
        self._content, self._digest = new_buffer(HEAD_BYTES), hashlib.sha256()
        self._error: BaseException | None = None
        self._thread = ReadThread(lambda: self._read(fd))

    def start(self) -> None:
        """Raises RuntimeError: there is no thread."""
        self._thread.start()

    def wait(self) -> None:
        """Return once they are read."""
        self._thread.wait()

    def end(self) -> None:
        """Return once the file is let go of; an interrupt (Ctrl-C) is raised after that: it is closed next."""
        self._thread.end()
        self._content = memoryview(b"")

    def pour(self, spans: Sequence[Span]) -> tuple[hashlib._Hash, int, Sequence[Span]]:
        """Put what was read into the file's spans, once.

        Returns:
            The hash's state after it, where it ends (0: the file system can't read round the page cache), and what of the
            spans lies behind that.

        Raises:
            EOFError, OSError: It can't be read.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        content, self._content = self._content, memoryview(b"")
        return self._digest, len(content), filled(spans, content)

    def _read(self, fd: int) -> None:
        try:
            with direct(fd) if self.cold else nullcontext():
                read_fully(fd, self._content, 0, HEAD_BYTES)
            with self._cpus:
                self._digest.update(self._content)
        except NotDirect:
            self._content = memoryview(b"")
        except BaseException as error:  # noqa: BLE001 - raised where the bytes are wanted
            self._error = error
