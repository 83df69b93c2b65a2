"""A thread that does one thing after the other for the loop, which never waits for it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

log = logging.getLogger(__name__)

#: Longer than any clock of a file system takes to go on.
REST_S: Final = 0.025

_URGENT, _USUAL, _LAST = range(3)


class Worker:
    """One thread; jobs in order, urgent ones first; what came of them goes back to the loop.

    The loop polls `fileno()` and calls `deliver()`; only there are the callbacks called.

    Args:
        name: The thread's.
        at_rest: Called by the thread, once, when no job has come for REST_S after the last one; mustn't take long.
    """

    def __init__(self, name: str, at_rest: Callable[[], None] = lambda: None) -> None:
        self._at_rest = at_rest
        self._jobs: list[tuple[int, int, Callable[[], None] | None]] = []  # a heap
        self._some = threading.Condition()
        self._number = itertools.count()
        self._results: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fileno(self) -> int:
        """Readable while there is something to deliver."""
        return self._wake

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool = False) -> int:
        """Have `work` done; `done` gets what it returned, or the Exception it raised. Returns the job's number."""

        def job() -> None:
            try:
                result: Any = work()
            except Exception as error:  # noqa: BLE001 - whatever it was, the one who asked must hear of it
                result = error
            self.post(lambda: done(result))

        return self._put(_URGENT if urgent else _USUAL, job)

    def withdraw(self, number: int) -> bool:
        """Take a job back that nobody has begun; False when it has begun, and then nothing changes.

        The thread and the caller never both have it: whoever is first does.
        """
        with self._some:
            kept = [job for job in self._jobs if job[1] != number]
            withdrawn = len(kept) < len(self._jobs)
            if withdrawn:
                heapq.heapify(kept)
                self._jobs = kept
            return withdrawn

    def post(self, call: Callable[[], None], *, at_once: bool = True) -> None:
        """From inside a job: have the loop call this, before anything the job returns.

        at_once: Else the loop isn't woken for it, and calls it with what it does next, within a second.
        """
        self._results.append(call)
        if not at_once:
            return
        with contextlib.suppress(OSError):  # the loop looks by itself too, if later; this thread must live
            os.eventfd_write(self._wake, 1)

    def deliver(self) -> None:
        """Call back for everything that came in. A callback that raises is logged, and the others go on."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._results:
            try:
                self._results.popleft()()
            except Exception:
                log.exception("daemon.fault")

    def stop(self) -> None:
        """Do what was submitted, end the thread, and deliver the last results."""
        if self._thread.ident is not None:
            self._put(_LAST, None)
            self._thread.join()
            self.deliver()
        os.close(self._wake)

    def _put(self, urgency: int, job: Callable[[], None] | None) -> int:
        with self._some:
            number = next(self._number)
            heapq.heappush(self._jobs, (urgency, number, job))
            self._some.notify()
        return number

    def _take(self) -> Callable[[], None] | None:
        with self._some:
            if not self._jobs and not self._some.wait_for(lambda: self._jobs, REST_S):
                return self._rest
            return heapq.heappop(self._jobs)[2]

    def _rest(self) -> None:
        try:
            self._at_rest()
        except Exception:
            log.exception("daemon.fault")
        with self._some:
            self._some.wait_for(lambda: self._jobs)

    def _work(self) -> None:
        while (job := self._take()) is not None:
            job()
