"""Copies by several threads: every byte once, nobody in the memory afterwards, no thread left."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.errors import UnstorableState
from ckptd.tensors import copy_threads
from ckptd.tensors.capture import capture, copy_into
from ckptd.tensors.copy_threads import CopyThreads, pieces
from ckptd_places import places
from fake_daemon import wait_until
from slot_contents import stored

__all__ = ["places"]

MIB = 1024 * 1024


@pytest.fixture
def threads() -> Iterator[CopyThreads]:
    made = CopyThreads(3)
    yield made
    made.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_threads, "PIECE_BYTES", 100_003)


def copiers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ckptd-copy")]


@pytest.fixture(autouse=True)
def _those_of_others_are_gone() -> None:
    """What clients of other tests have left ends when they are collected."""
    wait_until(lambda: gc.collect() >= 0 and not copiers())


def many_kinds() -> dict[str, Any]:
    torch.manual_seed(1)
    large = torch.randn(700, 333)
    return {
        "large": large,
        "odd": torch.randint(0, 255, (300_001,), dtype=torch.uint8),
        "small": [torch.randn(n) for n in range(40)],
        "transposed": torch.randn(400, 300).t(),
        "channels_last": torch.randn(2, 8, 90, 90).to(memory_format=torch.channels_last),
        "strided": torch.randn(600, 600)[::2, ::3],
        "expanded": torch.randn(1, 500).expand(300, 500),
        "conjugated": torch.randn(200, 300, dtype=torch.complex64).conj(),
        "negated": torch.randn(200, 300, dtype=torch.complex64).conj().imag,
        "middle": torch.randn(1000, 200)[100:900],
        "half": torch.randn(333, 333).to(torch.bfloat16),
        "tied": large,
        "empty": torch.empty(0, 7),
    }


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_every_kind_of_tensor_is_copied_bit_for_bit_however_many_threads_help(
    helpers: int, small_pieces: None
) -> None:
    state, threads = many_kinds(), CopyThreads(helpers)
    captured = capture(state, rng=False)
    buffer = bytearray(b"\xa5" * captured.data_bytes)
    copy_into(captured, memoryview(buffer), threads)
    leaves = [each for value in state.values() for each in (value if isinstance(value, list) else [value])]
    assert all(torch.equal(stored(captured, i, buffer), leaf) for i, leaf in enumerate(leaves))
    assert len(leaves) == len(captured.tensors)
    threads.close()


def test_a_large_tensor_is_cut_into_pieces_that_cover_it_once(small_pieces: None) -> None:
    moves = [(0, 10_000_000, 250_000), (250_048, 20_000_000, 70_001), (400_000, 30_000_000, 100_003)]
    cut = list(pieces(moves, 1000))
    assert [sum(move[2] for move in piece) for piece in cut] == [100_003] * 4 + [19_992]
    covered = sorted(move for piece in cut for move in piece)
    for to, source, length in moves:
        mine = [move for move in covered if to <= move[0] < to + length]
        ends = [to, *(start + size for start, _, size in mine)]
        assert [start for start, _, _ in mine] == ends[:-1] and ends[-1] == to + length
        assert all(at - start == source - to for start, at, _ in mine)


def test_pieces_are_few_large_ones_first_and_small_ones_last() -> None:
    sizes = [
        sum(move[2] for move in piece) for piece in pieces([(0, 0, 200 * MIB), (200 * MIB, 0, 100 * MIB)], 2)
    ]
    assert sum(sizes) == 300 * MIB and len(sizes) < 20
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 75 * MIB
    assert sizes[-2] == copy_threads.PIECE_BYTES


def test_the_threads_are_kept_from_copy_to_copy_and_none_is_left_after_close(small_pieces: None) -> None:
    threads = CopyThreads(2)
    captured = capture({"t": torch.randn(MIB)}, rng=False)
    buffer = memoryview(bytearray(captured.data_bytes))
    copy_into(captured, buffer, threads)
    first = copiers()
    copy_into(captured, buffer, threads)
    assert copiers() == first and len(first) == 2 and all(thread.daemon for thread in first)
    threads.close()
    threads.close()
    assert copiers() == []


def test_dropped_threads_end_too(small_pieces: None) -> None:
    threads = CopyThreads(2)
    captured = capture({"t": torch.randn(MIB)}, rng=False)
    copy_into(captured, memoryview(bytearray(captured.data_bytes)), threads)
    started = copiers()
    del threads
    gc.collect()
    for thread in started:
        thread.join(60)
    assert started and copiers() == []


def test_nothing_of_state_or_buffer_is_held_once_it_is_copied(
    threads: CopyThreads, small_pieces: None
) -> None:
    tensor = torch.randn(MIB)
    gone = weakref.ref(tensor)
    captured = capture({"t": tensor}, rng=False)
    with mmap.mmap(-1, captured.data_bytes) as region, memoryview(region) as view:
        copy_into(captured, view, threads)
    del captured, tensor
    assert gone() is None


def test_an_error_in_one_thread_is_raised(
    threads: CopyThreads, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    failed = threading.Event()

    def memmove(to: int, source: int, length: int) -> None:
        if threading.current_thread() is threading.main_thread():
            failed.wait(60)  # so that it isn't the one to do all
            return
        failed.set()
        raise MemoryError("no room")

    monkeypatch.setattr(copy_threads, "move_bytes", memmove)
    with pytest.raises(MemoryError, match="no room"):
        threads.move([(0, 0, 20 * MIB)], lambda: None)


def test_no_thread_is_in_the_memory_any_more_when_the_caller_is_interrupted(
    threads: CopyThreads, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    began, go_on = threading.Event(), threading.Event()
    inside: list[str] = []

    def memmove(to: int, source: int, length: int) -> None:
        inside.append("in")
        began.set()
        go_on.wait(60)
        inside.append("out")

    def fail() -> None:
        began.wait(60)
        threading.Timer(0.05, go_on.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(copy_threads, "move_bytes", memmove)
    with pytest.raises(KeyboardInterrupt):
        threads.move([(0, 0, 20 * MIB)], fail)
    assert inside.count("in") == inside.count("out") > 0


def test_a_thread_that_comes_late_touches_nothing(threads: CopyThreads, small_pieces: None) -> None:
    work = copy_threads._Work(pieces([(0, 0, MIB)], 4))  # addresses that would end the process
    work.end()
    work.help()
    assert work.error is None and len(work) == 0


def test_a_forked_child_copies_with_threads_of_its_own(threads: CopyThreads, small_pieces: None) -> None:
    captured = capture({"t": torch.arange(MIB)}, rng=False)
    copy_into(captured, memoryview(bytearray(captured.data_bytes)), threads)
    threads._starting.acquire()  # as another thread of the parent may hold it
    child = os.fork()
    if child == 0:
        code = 3
        signal.alarm(60)
        try:
            target = bytearray(captured.data_bytes)
            copy_into(captured, memoryview(target), threads)
            whole = np.array_equal(np.frombuffer(target, np.int64), np.arange(MIB))
            threads.close()
            code = 0 if whole and not [t for t in copiers() if t.is_alive()] else 4
        finally:
            os._exit(code)
    threads._starting.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    copy_into(captured, memoryview(bytearray(captured.data_bytes)), threads)


def test_a_closed_client_leaves_no_thread(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_threads, "_spare_cpus", lambda: 2)
    with ckptd.Client(places, daemon="off") as client:
        client.snapshot(1, {"t": torch.ones(3 * copy_threads.PIECE_BYTES // 4)})
        assert len(copiers()) == 2
    assert copiers() == []


def test_a_tensor_whose_memory_was_given_back_since_is_refused_by_key_path(threads: CopyThreads) -> None:
    state = {"a": {"w": torch.ones(100)}}
    captured = capture(state, rng=False)
    state["a"]["w"].untyped_storage().resize_(0)
    with pytest.raises(UnstorableState, match=r"state\['a'\]\['w'\]"):
        copy_into(captured, memoryview(bytearray(captured.data_bytes)), threads)
