"""A thread that reads into memory of others is out of it when it was ended, whatever interrupts that."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ckptd.disk.read_thread import ReadThread, end_all

PATIENCE_S = 60.0


@pytest.fixture
def heard() -> Iterator[threading.Event]:
    """Set once SIGUSR1 has interrupted this thread as Ctrl-C would."""
    event = threading.Event()

    def interrupt(*_: object) -> None:
        if not event.is_set():
            event.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield event
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_is_raised_once_all_have_ended(heard: threading.Event) -> None:
    done, here, begun = list[int](), threading.get_ident(), threading.Semaphore(0)

    def work(number: int) -> None:
        begun.release()
        while not threads[0]._given_up:
            time.sleep(0.001)
        while number == 0 and not heard.wait(0.01):  # one that comes just before a wait doesn't end it
            signal.pthread_kill(here, signal.SIGUSR1)
        assert heard.wait(PATIENCE_S)
        if number == 0:
            time.sleep(0.05)  # whoever doesn't wait for it is back by then
        done.append(number)

    threads = [ReadThread(lambda number=number: work(number)) for number in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=PATIENCE_S)
    with pytest.raises(KeyboardInterrupt):
        end_all(threads)
    assert sorted(done) == [0, 1]


def test_one_that_was_ended_before_it_began_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start, done = threading.Thread.start, list[int]()

    def interrupted(_thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    thread = ReadThread(lambda: done.append(1))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
    thread.end()
    assert thread._thread is not None
    start(thread._thread)  # it was on its way
    thread.wait()
    assert not done


def test_a_forked_child_waits_for_no_thread_of_its_parents() -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(PATIENCE_S)

    thread = ReadThread(work)
    thread.start()
    assert begun.wait(PATIENCE_S)
    if (pid := os.fork()) == 0:
        signal.alarm(int(PATIENCE_S))
        try:
            thread.end()
            os._exit(0)
        finally:
            os._exit(1)
    go.set()
    thread.end()
    assert os.waitpid(pid, 0)[1] == 0
