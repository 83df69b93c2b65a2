"""A copy beside the training: whole, bit for bit, by whoever has time, and never longer in memory than it says."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from ckptd.snapshot.descriptor import TensorSpec
from ckptd.tensors import background_copy
from ckptd.tensors.background_copy import BATCH_BYTES, BackgroundCopy, CopyThread, batches
from ckptd.tensors.capture import capture
from ckptd.tensors.copy_threads import CopyThreads
from fake_daemon import wait_until
from held_copies import HeldCopies, expected_of


def pairs_of(state: dict[str, Any]) -> tuple[list[tuple[TensorSpec, torch.Tensor]], memoryview]:
    captured = capture(state, rng=False)
    owned = [row for row in captured.tensors if row.alias_of is None]
    return list(zip(owned, captured.sources, strict=True)), memoryview(bytearray(captured.data_bytes))


def started(copy: BackgroundCopy) -> None:
    """In a thread that ends with it."""
    thread = CopyThread()
    thread.begin(copy)
    thread.close()


STATE = {
    "large": torch.arange(5_000_000, dtype=torch.int32),
    "turned": torch.arange(3_000_000.0).reshape(1500, 2000).t(),
    "strided": torch.arange(6_000_000.0).reshape(2000, 3000)[:, ::2],
    "half": torch.arange(5_000_000, dtype=torch.float32).to(torch.float8_e5m2),
    "number": torch.tensor(3),
    "empty": torch.ones(0),
}


def test_batches_are_small_and_whole() -> None:
    given, _ = pairs_of(STATE)
    made = list(batches(given))
    sizes = [sum(row.nbytes for row, _ in batch) for batch in made]
    strided = next(row.nbytes for row, _ in given if row.path == ("strided",))
    assert sorted(size for size in sizes if size > BATCH_BYTES) == [
        strided
    ]  # only torch can copy that: in one go
    assert sum(sizes) == sum(row.nbytes for row, _ in given)


@pytest.mark.parametrize("helping", [False, True])
def test_every_byte_arrives_whoever_copies_it(helping: bool) -> None:
    given, memory = pairs_of(STATE)
    ended = threading.Event()
    copy = BackgroundCopy(given, [], memory, threads=CopyThreads(1), ended=lambda _: ended.set())
    started(copy)
    if helping:
        copy.let_go()
    assert copy.wait(20)
    assert ended.wait(20)
    assert copy.error is None
    for row, source in given:
        stored = bytes(memory[row.offset : row.offset + row.nbytes])
        assert stored == expected_of({"one": source})[("one",)]


def test_who_waits_takes_over_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldCopies(monkeypatch)
    given, memory = pairs_of({"a": torch.ones(256), "b": torch.ones(256), "c": torch.ones(256)})
    copy = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: None)
    started(copy)
    assert held.begun.wait(10)
    assert not copy.wait(0.01)
    held.begun.clear()
    threading.Timer(0.01, held.may.set).start()
    copy.let_go()
    assert held.by == ["ckptd-overlap", "MainThread"]
    assert copy.wait(10)


def test_nothing_is_kept_of_a_copy_that_has_ended() -> None:
    given, memory = pairs_of({"a": torch.ones(256)})
    source = weakref.ref(given[0][1])
    copy = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: None)
    started(copy)
    assert copy.wait(10)
    del given
    memory.release()  # refused while anything views it
    wait_until(lambda: gc.collect() >= 0 and source() is None)


def test_nothing_is_kept_of_a_copy_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldCopies(monkeypatch)
    held.error = RuntimeError("gone")
    held.may.set()
    given, memory = pairs_of({"a": torch.ones(256), "b": torch.ones(256)})
    source = weakref.ref(given[0][1])
    copy = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: None)
    started(copy)
    assert copy.wait(10)
    assert str(copy.error) == "gone"
    assert len(held.by) == 1
    del given
    wait_until(lambda: gc.collect() >= 0 and source() is None)


def test_where_no_thread_can_be_started_all_is_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    given, memory = pairs_of({"a": torch.ones(256)})
    told: list[BackgroundCopy] = []
    copy = BackgroundCopy(given, [], memory, threads=None, ended=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(background_copy.threading.Thread, "start", refused)
        started(copy)
    assert copy.has_ended
    assert told == [copy]
    assert bytes(memory) == torch.ones(256).numpy().tobytes()
