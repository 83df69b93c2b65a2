"""A thread that does one thing after the other for the loop, which never waits for it."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

_URGENT, _USUAL, _LAST = range(3)


class Worker:
    """One thread; jobs in order, urgent ones first; what came of them goes back to the loop.

    The loop polls `fileno()` and calls `deliver()`; only there are the callbacks called.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._number = itertools.count()
        self._results: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fileno(self) -> int:
        """Readable while there is something to deliver."""
        return self._wake

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool = False) -> None:
        """Have `work` done; `done` gets what it returned, or the Exception it raised."""

        def job() -> None:
            try:
                result: Any = work()
            except Exception as error:  # noqa: BLE001 - whatever it was, the one who asked must hear of it
                result = error
            self.post(lambda: done(result))

        self._jobs.put((_URGENT if urgent else _USUAL, next(self._number), job))

    def post(self, call: Callable[[], None]) -> None:
        """From inside a job: have the loop call this, before anything the job returns."""
        self._results.append(call)
        os.eventfd_write(self._wake, 1)

    def deliver(self) -> None:
        """Call back for everything that came in. A callback that raises is logged, and the others go on."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._results:
            try:
                self._results.popleft()()
            except Exception:
                log.exception("daemon.fault")

    def stop(self) -> None:
        """Do what was submitted, end the thread, and deliver the last results."""
        if self._thread.ident is not None:
            self._jobs.put((_LAST, next(self._number), None))
            self._thread.join()
            self.deliver()
        os.close(self._wake)

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()
