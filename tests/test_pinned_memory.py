"""Slots registered with CUDA, with a runtime that stands for it: once, for as long as they are mapped, or not at all."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from ckptd.snapshot.mapped_memory import MappedMemory
from ckptd.snapshot.slots import Slot
from ckptd.tensors.pinned_memory import pin


class FakeRuntime:
    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.asked: list[int] = []
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append(size)
        if not self.answer:
            self.pinned[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_a_slot_is_pinned_whole_and_once_and_given_back_before_it_is_unmapped(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    slot = Slot.create(tmp_path / "slot", 100_000)
    assert pin(slot.data[:10], runtime=runtime)
    assert pin(slot.data, runtime=runtime)
    assert (runtime.asked, list(runtime.pinned.values())) == ([slot.capacity], [slot.capacity])
    slot.close()
    assert runtime.pinned == {}


def test_memory_that_outlives_its_slot_is_given_back_with_the_last_view(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    mapping = MappedMemory(-1, 8192)
    view = memoryview(mapping)
    pin(view, runtime=runtime)
    del mapping
    assert runtime.pinned
    del view
    gc.collect()
    assert runtime.pinned == {}


def test_a_refusal_is_not_asked_again_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime(answer=2)
    slot = Slot.create(tmp_path / "slot", 100_000)
    assert not pin(slot.data, runtime=runtime)
    assert not pin(slot.data, runtime=runtime)
    assert len(runtime.asked) == 1
    assert "slot.not_pinned" in caplog.text
    slot.close()


def test_other_memory_is_left_as_it_is() -> None:
    runtime = FakeRuntime()
    assert not pin(memoryview(bytearray(10)), runtime=runtime)
    assert runtime.asked == []
