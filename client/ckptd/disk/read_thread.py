"""A thread that reads into memory and from descriptors of whoever started it, and that can be got out of both.

`threading.Thread.join` is no way to do that: where an interrupt (Ctrl-C) is raised in it, Python 3.11 takes the thread
for ended, so that another join returns at once, and one that was interrupted while it started can't be joined at all.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

__all__ = ["ReadThread", "end_all"]


class ReadThread:
    """One piece of work in a thread of its own. `end` has to be called, whatever happened to `start`.

    Args:
        work: What it does; raises nothing.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._given_up, self._pid = work, False, os.getpid()
        self._working = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises RuntimeError: the system has no thread."""
        self._thread = threading.Thread(target=self._run, name="ckptd-read", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return once the work is done. One that is interrupted says nothing about that: then `end` does."""
        if self._thread is not None:
            self._thread.join()

    def end(self) -> None:
        """Have the work not begin any more, or wait for its end. An interrupt meanwhile is raised after that."""
        end_all([self])

    def _leave(self) -> None:
        self._given_up = True
        if os.getpid() == self._pid:  # a forked child has no such thread
            with self._working:
                pass
            with suppress(RuntimeError):  # its start was interrupted: it may begin yet, and does nothing
                self.wait()

    def _run(self) -> None:
        with self._working:
            if not self._given_up:
                self._work()


def end_all(threads: Iterable[ReadThread]) -> None:
    """`ReadThread.end` of each of them: an interrupt is raised once all have ended."""
    left, interrupt = deque(threads), None
    while left:
        try:
            left[0]._leave()
            left.popleft()
        except BaseException as error:  # noqa: BLE001 - Ctrl-C: what they use must not be given back for it
            interrupt = error
    if interrupt is not None:
        raise interrupt
