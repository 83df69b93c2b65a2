from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from ckptd.disk import crew, priority
from ckptd.disk.crew import Crew, Job, Lane
from ckptd.disk.priority import LOWEST, Urgency, have_step_forward, lower_this_thread, step_back_session

Steps = Generator[None, None, str]


def counted(count: int, result: str = "done") -> Steps:
    for _ in range(count):
        yield
    return result


def raising(error: BaseException) -> Steps:
    yield
    raise error


def endless(closed: list[str]) -> Steps:
    """Ends after all, so that a crew that doesn't stop it is told from one that hangs."""
    ends = time.monotonic() + 30
    try:
        while time.monotonic() < ends:
            yield
        return "nobody stopped it"
    except GeneratorExit:
        closed.append("closed")
        raise


def do(
    jobs: list[Job], at_once: int = 2, urgency: Urgency | None = None, **options: Callable[..., bool]
) -> None:
    Crew([Lane(jobs, at_once)], urgency or Urgency(), name="test", **options).do()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Generator[None, None, None]:
    before = set(threading.enumerate())  # what other tests have left may end meanwhile
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_every_job_is_done_and_says_what_came_of_it(at_once: int) -> None:
    jobs = [Job(counted(number, str(number))) for number in range(10)]
    do(jobs, at_once)
    assert [job.result for job in jobs] == [str(number) for number in range(10)]


def test_lanes_have_threads_of_their_own() -> None:
    """One lane's job waits for the other's, however many wait before it."""
    turn = threading.Event()

    def waits() -> Steps:
        yield
        assert turn.wait(60)
        return "waited"

    def sets() -> Steps:
        turn.set()
        yield
        return "set"

    first, second = Job(waits()), Job(sets())
    Crew([Lane([first], 1), Lane([second], 1)], Urgency(), name="test").do()
    assert (first.result, second.result) == ("waited", "set")


def test_nothing_to_do_takes_no_thread() -> None:
    Crew([Lane([], 5), Lane([], 1)], Urgency(), name="test").do()


def test_the_error_of_one_gives_the_others_up() -> None:
    closed: list[str] = []
    begun = threading.Event()

    def fails_later() -> Steps:
        yield
        assert begun.wait(60)
        raise OSError(5, "x")

    def goes_on() -> Steps:
        begun.set()
        yield from endless(closed)
        return ""

    broken, other, unbegun = Job(fails_later()), Job(goes_on()), Job(endless(closed))
    do([broken, other, unbegun])
    assert isinstance(broken.error, OSError) and other.error is None
    assert closed == ["closed"]  # what was never begun has nothing to clear away


def test_an_error_that_does_not_stop_lets_the_others_end() -> None:
    broken, other = Job(raising(OSError(5, "x"))), Job(counted(1000, "all of it"))
    do([broken, other], stops=lambda error: not isinstance(error, OSError))
    assert isinstance(broken.error, OSError)
    assert other.result == "all of it"


def test_an_interrupt_of_who_waits_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    urgency = Urgency()

    def interrupted() -> None:
        raise KeyboardInterrupt

    begun = threading.Event()

    def job() -> Steps:
        begun.set()
        yield from endless(closed)
        return ""

    real = urgency.changed.wait

    def wait(timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            urgency.changed.release()
            begun.wait(60)
            urgency.changed.acquire()
            interrupted()
        return real(timeout)

    monkeypatch.setattr(urgency.changed, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        do([Job(job())], urgency=urgency)
    assert closed == ["closed"]


def test_without_threads_all_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(crew.threading, "Thread", NoThread)
    with pytest.raises(OSError, match="can't start"):
        do([Job(counted(3))])


# --- priorities -----------------------------------------------------------------------------------


def nice_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_that_nobody_waits_for_is_done_at_the_lowest_priority_and_handed_over_when_somebody_does() -> (
    None
):
    urgency = Urgency(False)
    usual = nice_of_this_thread()
    seen: list[tuple[int, str]] = []

    def job() -> Steps:
        for wanted in (False, True, False):
            urgency.set(wanted)
            yield
            seen.append((nice_of_this_thread(), threading.current_thread().name))
        return "in one piece"

    work = Job(job())
    do([work], urgency=urgency)
    assert work.result == "in one piece"
    assert [nice for nice, _ in seen] == [LOWEST, usual, LOWEST]
    assert nice_of_this_thread() == usual


def test_urgent_work_takes_no_low_thread_at_all() -> None:
    seen: set[int] = set()

    def job() -> Steps:
        seen.add(nice_of_this_thread())
        yield
        return ""

    do([Job(job()) for _ in range(5)])
    assert seen == {nice_of_this_thread()}


def test_lowering_a_thread_leaves_the_others_as_they_are() -> None:
    usual, seen = nice_of_this_thread(), []

    def lowered() -> None:
        lower_this_thread()
        seen.append(nice_of_this_thread())

    thread = threading.Thread(target=lowered)
    thread.start()
    thread.join()
    assert (seen, nice_of_this_thread()) == ([LOWEST], usual)


def test_the_session_steps_back_from_the_first_work_on_but_for_as_long_as_somebody_waits() -> None:
    told: list[bool] = []
    urgency = Urgency(False, lambda back: told.append(back) or True)
    urgency.set(True)
    urgency.set(False)
    assert not told  # there was no work yet

    def job() -> Steps:
        assert told == [True]
        urgency.set(True)
        yield
        assert told == [True, False]
        urgency.set(False)
        yield
        return ""

    work = Job(job())
    do([work], urgency=urgency)
    assert work.error is None
    assert told == [True, False, True]
    do([Job(iter(()))], urgency=urgency)  # type: ignore[arg-type]
    assert told == [True, False, True, True]  # said again: a client may have had it step forward meanwhile
    urgency.set(True)
    do([Job(iter(()))], urgency=urgency)  # type: ignore[arg-type]
    assert told == [True, False, True, True, False]


def test_what_the_kernel_refuses_so_soon_is_tried_again() -> None:
    answers, told = iter([False, False, True, True]), list[bool]()
    urgency = Urgency(False, lambda back: told.append(back) or next(answers))
    urgency.work_begins()
    for _ in range(3):
        urgency.set(False)
    assert told == [True] * 3
    urgency.set(True)
    assert told == [True, True, True, False]


class Autogroup:
    """Stands in for /proc/self/autogroup."""

    def __init__(self, error: OSError | None = None) -> None:
        self.written: list[str] = []
        self._error = error

    def write_text(self, text: str) -> None:
        self.written.append(text)
        if self._error is not None:
            raise self._error


def test_only_a_session_of_ones_own_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Autogroup()
    monkeypatch.setattr(priority, "_AUTOGROUP", group)
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid() + 1)
    assert step_back_session(True)
    assert group.written == []
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    assert step_back_session(True) and step_back_session(False)
    assert group.written == ["15", "0"]


@pytest.mark.parametrize(
    ("number", "done"), [(errno.EAGAIN, False), (errno.ENOENT, True), (errno.EPERM, True)]
)
def test_a_kernel_without_groups_of_sessions_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, number: int, done: bool
) -> None:
    monkeypatch.setattr(priority, "_AUTOGROUP", Autogroup(OSError(number, os.strerror(number))))
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    assert step_back_session(True) is done


def test_who_waits_brings_a_session_forward_that_gave_way_and_no_other() -> None:
    group = Path("/proc/self/autogroup")
    if not group.exists() or not group.read_text().strip():
        pytest.skip("this kernel doesn't share CPUs between sessions first")
    if os.geteuid() != 0:
        pytest.skip("only root may change it several times within a tenth of a second")
    script = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        of_other = Path(f"/proc/{other.pid}/autogroup")
        for nice, then in (("15", "0"), ("3", "3")):
            of_other.write_text(nice)
            have_step_forward(other.pid)
            assert of_other.read_text().split()[-1] == then
        other.stdin.close()
    have_step_forward(other.pid)  # it is gone
