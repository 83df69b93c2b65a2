"""Helpers run beside the one that they help: each on a CPU that the other isn't on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from ckptd.tensors import other_cpus
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.other_cpus import OtherCpus, this_cpu

MIB = 1024 * 1024
ALLOWED = sorted(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU")


@pytest.fixture
def helper() -> Iterator[threading.Thread]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    yield thread
    end.set()
    thread.join()


def cpus_of(thread: threading.Thread) -> list[int]:
    return sorted(os.sched_getaffinity(thread.native_id or 0))


def test_a_helper_is_kept_off_the_cpu_of_the_caller_wherever_that_has_moved(
    helper: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = OtherCpus()
    for here in (ALLOWED[0], ALLOWED[0], ALLOWED[1]):
        monkeypatch.setattr(other_cpus, "this_cpu", lambda here=here: here)
        cpus.keep_off_this([helper])
        assert cpus_of(helper) == [cpu for cpu in ALLOWED if cpu != here]
        assert sorted(os.sched_getaffinity(0)) == ALLOWED


def test_a_helper_that_came_later_is_kept_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_cpus, "this_cpu", lambda: ALLOWED[0])
    cpus, end = OtherCpus(), threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(2)]
    for number, thread in enumerate(threads):
        thread.start()
        cpus.keep_off_this(threads[: number + 1])
        assert [cpus_of(each) for each in threads[: number + 1]] == [ALLOWED[1:]] * (number + 1)
    end.set()


def test_nobody_is_moved_where_the_caller_has_one_cpu_or_it_cant_be_told_which(
    helper: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bound() -> None:
        os.sched_setaffinity(0, {ALLOWED[0]})
        OtherCpus().keep_off_this([helper])

    assert this_cpu() in ALLOWED
    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert cpus_of(helper) == ALLOWED
    monkeypatch.setattr(other_cpus, "this_cpu", lambda: -1)
    OtherCpus().keep_off_this([helper])
    assert cpus_of(helper) == ALLOWED


def test_a_system_that_refuses_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: int, _cpus: set[int]) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    source, target = bytearray(os.urandom(20 * MIB)), bytearray(20 * MIB)
    threads = CopyThreads(1)
    with memoryview(source) as one, memoryview(target) as other:
        threads.move([(_address(other), _address(one), 20 * MIB)], lambda: None)
    threads.close()
    assert source == target


def test_the_threads_that_copy_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_cpus, "this_cpu", lambda: ALLOWED[1])
    target, threads = bytearray(20 * MIB), CopyThreads(1)
    seen: list[list[int]] = []

    def look() -> None:
        helper = next(each for each in threading.enumerate() if each.name == "ckptd-copy-0")
        seen.append(cpus_of(helper))

    with memoryview(bytes(20 * MIB)) as one, memoryview(target) as other:
        threads.move([(_address(other), _address(one), 20 * MIB)], look)
    threads.close()
    assert seen == [[cpu for cpu in ALLOWED if cpu != ALLOWED[1]]]


def _address(memory: memoryview) -> int:
    import numpy

    return int(numpy.frombuffer(memory, numpy.uint8).ctypes.data)
