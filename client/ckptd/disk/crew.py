"""Threads that do several long jobs step by step, and hand them over when it becomes urgent, or no longer is.

There are two sets of threads, one at normal and one at the lowest priority; only one of them is on duty. They live
for one `do()`: what is worth a thread takes far longer than to start one.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.disk.priority import Urgency, lower_this_thread


@dataclass(eq=False, slots=True)
class Job:
    """Something done in steps; between two steps another thread may take it over.

    Attributes:
        steps: What is done; closed when it is given up.
        result: What came of it.
        error: What it failed with; None unless it did.
    """

    steps: Generator[None, None, Any]
    result: Any = None
    error: BaseException | None = None

    def go_on(self, may: Callable[[], bool]) -> bool:
        """Step by step while it may; whether it has ended."""
        try:
            while may():
                next(self.steps)
        except StopIteration as done:
            self.result = done.value
        except BaseException as error:  # noqa: BLE001 - the one who had it done hears of it
            self.error = error
        else:
            return False
        return True


def do_all(
    jobs: Sequence[Generator[None, None, Any]], urgency: Urgency, *, name: str, at_once: int | None = None
) -> list[Any]:
    """Do these jobs once, so many at once (None: as there are CPUs); what came of each.

    The threads at normal priority have the priority of the calling one.

    Raises:
        OSError: No thread can be started (ENOMEM); all were given up.
        BaseException: What the first that failed has failed with; the others were given up.
    """
    all_jobs = [Job(steps) for steps in jobs]
    Crew([Lane(all_jobs, at_once or len(os.sched_getaffinity(0)))], urgency, name=name).do()
    for job in all_jobs:
        if job.error is not None:
            raise job.error
    return [job.result for job in all_jobs]


def in_one_step(call: Callable[[], Any]) -> Generator[None, None, Any]:
    """A job that isn't handed over once it has begun."""
    yield
    return call()


class Lane:
    """Jobs of one kind, in order, some of them at once.

    Args:
        jobs: The first ones are begun first.
        at_once: How many.
    """

    def __init__(self, jobs: Sequence[Job], at_once: int) -> None:
        self.waiting, self.left = deque(jobs), len(jobs)
        self.at_once = min(at_once, len(jobs))


class Crew:
    """Does jobs once.

    Args:
        lanes: The jobs; each lane has threads of its own.
        urgency: Says which threads are on duty.
        name: What the threads are called.
        stops: Whether the others are given up for an error of one.
    """

    def __init__(
        self, lanes: Sequence[Lane], urgency: Urgency, *, name: str,
        stops: Callable[[BaseException], bool] = lambda _error: True,
    ) -> None:  # fmt: skip
        self._lanes, self._urgency, self._name, self._stops = lanes, urgency, name, stops
        self._threads: dict[bool, list[threading.Thread]] = {}  # urgent or not
        self._stopped = False

    def do(self) -> None:
        """Return when all jobs have ended or were given up: no thread is left, and each job says what came of it.

        Raises:
            OSError: No thread can be started (ENOMEM); all were given up.
        """
        self._urgency.work_begins()
        try:
            with self._urgency.changed:
                while not self._stopped and any(lane.left for lane in self._lanes):
                    self._start(self._urgency.now)
                    self._urgency.changed.wait()
        finally:
            self._stop()

    def _start(self, urgent: bool) -> None:
        """Have the threads that are on duty now."""
        if urgent in self._threads:
            return
        threads = self._threads[urgent] = []
        for lane in self._lanes:
            for number in range(lane.at_once):
                name = f"{self._name}-{number}"
                threads.append(
                    threading.Thread(target=self._work, args=(lane, urgent), name=name, daemon=True)
                )
                try:
                    threads[-1].start()
                except RuntimeError as error:  # as of memory: whatever else is tried now fails alike
                    raise OSError(errno.ENOMEM, str(error)) from error

    def _stop(self) -> None:
        with self._urgency.changed:
            self._stopped = True
            self._urgency.changed.notify_all()
        for threads in self._threads.values():
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        for lane in self._lanes:
            for job in lane.waiting:
                job.steps.close()

    def _work(self, lane: Lane, urgent: bool) -> None:
        if not urgent:
            lower_this_thread()

        def on_duty() -> bool:
            return not self._stopped and self._urgency.now == urgent

        while (job := self._next(lane, on_duty)) is not None:
            ended = job.go_on(on_duty)
            with self._urgency.changed:
                if ended:
                    lane.left -= 1
                    self._stopped |= job.error is not None and self._stops(job.error)
                else:
                    lane.waiting.appendleft(job)
                self._urgency.changed.notify_all()

    def _next(self, lane: Lane, on_duty: Callable[[], bool]) -> Job | None:
        """The next job for a thread; None when there is nothing more to do."""
        with self._urgency.changed:
            while not self._stopped and lane.left:
                if lane.waiting and on_duty():
                    return lane.waiting.popleft()
                self._urgency.changed.wait()
        return None
