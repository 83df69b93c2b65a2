from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptd_daemon.core.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.stop()


def deliver_until(worker: Worker, ready: Callable[[], bool]) -> None:
    while not ready():
        assert select.select([worker], [], [], 60)[0], "nothing came"
        worker.deliver()


def test_jobs_are_done_in_order_in_one_other_thread_and_results_come_back_in_this_one(
    worker: Worker,
) -> None:
    results: list[Any] = []
    threads: set[int] = set()
    for number in range(20):
        worker.submit(lambda n=number: (threads.add(threading.get_ident()), n)[1], results.append)
    worker.start()
    deliver_until(worker, lambda: len(results) == 20)
    assert results == list(range(20))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_urgent_jobs_go_before_the_others(worker: Worker) -> None:
    results: list[str] = []
    worker.submit(lambda: "usual", results.append)
    worker.submit(lambda: "urgent", results.append, urgent=True)
    worker.start()
    deliver_until(worker, lambda: len(results) == 2)
    assert results == ["urgent", "usual"]


def test_what_a_job_posts_arrives_before_what_it_returns(worker: Worker) -> None:
    results: list[str] = []
    worker.submit(lambda: worker.post(lambda: results.append("posted")) or "returned", results.append)
    worker.start()
    deliver_until(worker, lambda: len(results) == 2)
    assert results == ["posted", "returned"]


def test_what_can_wait_wakes_nobody_and_comes_with_the_next_result(worker: Worker) -> None:
    results: list[str] = []
    posted, go_on = threading.Event(), threading.Event()

    def job() -> str:
        worker.post(lambda: results.append("can wait"), at_once=False)
        posted.set()
        go_on.wait(60)
        return "returned"

    worker.submit(job, results.append)
    worker.start()
    assert posted.wait(60) and not select.select([worker], [], [], 0)[0]
    go_on.set()
    deliver_until(worker, lambda: len(results) == 2)
    assert results == ["can wait", "returned"]


def test_an_exception_is_a_result_and_the_thread_goes_on(worker: Worker) -> None:
    results: list[Any] = []
    worker.submit(lambda: 1 / 0, results.append)
    worker.submit(lambda: "next", results.append)
    worker.start()
    deliver_until(worker, lambda: len(results) == 2)
    assert isinstance(results[0], ZeroDivisionError) and results[1] == "next"


def test_a_callback_that_raises_does_not_lose_the_others(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[Any] = []
    worker.submit(lambda: 0, lambda result: 1 / result)
    worker.submit(lambda: "next", results.append)
    worker.start()
    deliver_until(worker, lambda: bool(results))
    assert results == ["next"]
    assert "ZeroDivisionError" in caplog.text


def test_stopping_does_what_was_submitted_first() -> None:
    worker = Worker("test")
    results: list[int] = []
    worker.start()
    for number in range(10):
        worker.submit(lambda n=number: n, results.append)
    worker.stop()
    assert results == list(range(10))


def test_a_job_that_was_withdrawn_is_never_done_and_one_that_has_begun_can_not_be(worker: Worker) -> None:
    results: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        assert go_on.wait(60)
        return "first"

    number = worker.submit(first, results.append)
    second = worker.submit(lambda: "second", results.append)
    worker.submit(lambda: "third", results.append)
    worker.start()
    assert begun.wait(60)
    assert not worker.withdraw(number)
    assert worker.withdraw(second) and not worker.withdraw(second)
    go_on.set()
    deliver_until(worker, lambda: len(results) == 2)
    assert results == ["first", "third"]


def test_a_result_that_can_not_be_announced_is_delivered_when_the_loop_looks_by_itself(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    results: list[str] = []
    done = threading.Event()
    with monkeypatch.context() as without:
        without.setattr(os, "eventfd_write", full)
        worker.submit(lambda: "first", results.append)
        worker.submit(done.set, lambda _: None)
        worker.start()
        assert done.wait(30)  # the thread lives
    worker.deliver()
    assert results == ["first"]
