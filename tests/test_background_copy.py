"""A copy beside the training: whole, bit for bit, by whoever has time, and never longer in memory than it says."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from ckptd.errors import TimedOut
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
    assert copy.wait(60)
    assert ended.wait(60)
    assert copy.error is None
    for row, source in given:
        stored = bytes(memory[row.offset : row.offset + row.nbytes])
        assert stored == expected_of({"one": source})[("one",)]


def test_who_waits_takes_over_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldCopies(monkeypatch)
    given, memory = pairs_of({"a": torch.ones(256), "b": torch.ones(256), "c": torch.ones(256)})
    copy = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: None)
    started(copy)
    assert held.begun.wait(60)
    assert not copy.wait(0.01)
    held.begun.clear()
    letting = threading.Thread(target=lambda: held.begun.wait(60) and held.may.set())
    letting.start()
    copy.let_go()
    letting.join()
    assert held.by == ["ckptd-overlap", "MainThread"]
    assert copy.wait(60)


class Device:
    """Copies from a device."""

    waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_who_waits_without_a_bound_needs_no_thread_that_copies() -> None:
    given, memory = pairs_of(STATE)
    told: list[BackgroundCopy] = []
    device: Any = Device()
    copy = BackgroundCopy(given, [device], memory, threads=None, ended=told.append)
    waiting = threading.Thread(target=copy.wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()
    assert copy.has_ended
    assert device.waited == 1
    copy.run()  # the thread is late
    assert told == [copy]
    assert bytes(memory[:4000]) == torch.arange(1000, dtype=torch.int32).numpy().tobytes()


def test_what_follows_a_copy_may_wait_while_the_next_is_copied() -> None:
    thread, may, ended = CopyThread(), threading.Event(), threading.Event()

    def waits() -> None:
        assert may.wait(60)

    given, memory = pairs_of({"a": torch.ones(256)})
    first = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: thread.follow(waits))
    second = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: thread.follow(ended.set))
    thread.begin(first)
    thread.begin(second)
    assert second.wait(60)
    assert not ended.is_set()
    may.set()
    assert ended.wait(60)
    thread.close()


def test_a_call_that_interrupts_the_copy_in_its_own_thread_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, memory = pairs_of({"a": torch.ones(256)})
    copy = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: None)
    seen: list[str] = []

    def interrupted(*how: Any) -> None:
        for call in (copy.wait, copy.let_go, lambda: copy.wait(60)):
            with pytest.raises(TimedOut, match="by what this call interrupts"):
                call()
            seen.append("told")

    monkeypatch.setattr(background_copy, "copy_tensors", interrupted)
    stepping = threading.Thread(target=copy.let_go, daemon=True)
    stepping.start()
    stepping.join(60)
    assert seen == ["told"] * 3
    assert not copy.interrupted_here
    assert copy.wait() is True


def test_nothing_is_kept_of_a_copy_that_has_ended() -> None:
    given, memory = pairs_of({"a": torch.ones(256)})
    source = weakref.ref(given[0][1])
    copy = BackgroundCopy(given, [], memory, threads=None, ended=lambda _: None)
    started(copy)
    assert copy.wait(60)
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
    assert copy.wait(60)
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
