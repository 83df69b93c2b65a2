"""Copies from devices, with streams and events that stand for CUDA's: what waits for what, and who never does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.tensors import device_copy, overlap, state_copy
from ckptd.tensors.background_copy import BackgroundCopy, CopyThread
from ckptd.tensors.capture import capture
from ckptd.tensors.device_copy import DeviceCopy
from ckptd_places import places
from fake_cuda import DeviceTensor, FakeCuda
from fake_daemon import FakeDaemon
from held_copies import expected_of, held_in

__all__ = ["places"]

DEVICE = torch.device("cuda:0")


def pair(cuda: FakeCuda, value: float) -> Any:
    return DeviceTensor(cuda, torch.zeros(4)), DeviceTensor(cuda, torch.full((4,), value))


def test_the_host_waits_for_one_event_and_the_trainer_for_none_when_all_is_copied_at_once() -> None:
    cuda = FakeCuda()
    place, source = pair(cuda, 1.0)
    copy = DeviceCopy(DEVICE, [], [(place, source)], cuda=cuda)
    assert cuda.log == ["side waits for trainer", "copy on side"]
    assert place.tensor.sum() == 0
    copy.wait()
    assert cuda.log[2:] == ["the host waits for side"]
    assert place.tensor.tolist() == [1.0] * 4


def test_what_the_trainer_computed_before_is_what_is_copied() -> None:
    cuda = FakeCuda()
    place, source = pair(cuda, 1.0)
    cuda.trainers.work.append(lambda: source.tensor.fill_(2.0))
    DeviceCopy(DEVICE, [], [(place, source)], cuda=cuda).wait()
    assert place.tensor.tolist() == [2.0] * 4


def test_the_trainers_stream_waits_for_what_its_next_work_may_change_and_the_host_does_not() -> None:
    cuda = FakeCuda()
    now, later = pair(cuda, 1.0), pair(cuda, 2.0)
    copy = DeviceCopy(DEVICE, [now], [later], cuda=cuda)
    assert cuda.log == [
        "side waits for trainer",
        "copy on side",
        "copy on side",
        "trainer waits for an event of side",
    ]
    cuda.trainers.work.append(lambda: now[1].tensor.fill_(9.0))  # the next forward pass
    cuda.trainers.run()
    assert now[0].tensor.tolist() == [1.0] * 4
    assert later[0].tensor.tolist() == [0.0] * 4
    copy.order()
    cuda.trainers.work.append(lambda: later[1].tensor.fill_(9.0))  # the step
    cuda.trainers.run()
    assert later[0].tensor.tolist() == [2.0] * 4
    assert "the host waits for side" not in cuda.log
    copy.wait()


def test_sources_live_until_the_last_byte_has_arrived() -> None:
    cuda = FakeCuda()
    one = pair(cuda, 1.0)
    source = weakref.ref(one[1])
    copy = DeviceCopy(DEVICE, [], [one], cuda=cuda)
    side = copy._end.stream
    del one
    side.work = [list] * len(side.work)  # as CUDA, which knows nothing of Python's references
    gc.collect()
    assert source() is not None
    copy.wait()
    gc.collect()
    assert source() is None


def test_a_step_orders_its_stream_and_only_the_copys_thread_waits_for_the_device() -> None:
    cuda = FakeCuda()
    place, source = pair(cuda, 3.0)
    device = DeviceCopy(DEVICE, [], [(place, source)], cuda=cuda)
    copy = BackgroundCopy([], [device], memoryview(bytearray()), threads=None, ended=lambda _: None)
    copy.let_go()
    assert cuda.log[2:] == ["trainer waits for an event of side"]
    CopyThread().begin(copy)
    assert copy.wait(60)
    assert cuda.log[3:] == ["the host waits for side"]
    assert place.tensor.tolist() == [3.0] * 4


def test_devices_are_waited_for_after_an_error_too() -> None:
    cuda = FakeCuda()
    device = DeviceCopy(DEVICE, [], [pair(cuda, 3.0)], cuda=cuda)
    broken: Any = [(None, None)]
    copy = BackgroundCopy([], [device], memoryview(bytearray()), threads=None, ended=lambda _: None)
    copy._left.append(broken)
    CopyThread().begin(copy)
    assert copy.wait(60)
    assert copy.error is not None
    assert cuda.log[-1] == "the host waits for side"


# --- a whole state, all of whose tensors but one lie on the device ---------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda = FakeCuda()

    def queue(pairs: Any) -> None:
        cuda.current.work.append(lambda: [place.copy_(source) for place, source in pairs])

    for module in (state_copy, overlap):
        monkeypatch.setattr(module, "has_side_stream", lambda tensor: tensor.dtype is not torch.int64)
    monkeypatch.setattr(state_copy, "pin", lambda memory: True)
    monkeypatch.setattr(state_copy, "DeviceCopy", partial(DeviceCopy, cuda=cuda))
    monkeypatch.setattr(device_copy, "_copy", queue)
    yield cuda


def test_a_snapshot_without_overlap_has_all_bytes_when_it_returns(cuda: FakeCuda) -> None:
    state = {
        "strided": torch.arange(24.0).reshape(4, 6)[:, ::2],
        "turned": torch.arange(24.0).reshape(4, 6).t(),
        "small": torch.tensor(1.5, dtype=torch.bfloat16),
        "none": torch.ones(0),
        "host": torch.arange(4),
    }
    wanted = {path: bytes(data) for path, data in expected_of(state).items()}
    captured = capture(state)
    memory = memoryview(bytearray(captured.data_bytes))
    state_copy.copy_at_once(captured, memory)
    assert cuda.log[-1] == "the host waits for side"
    for row, source in zip(captured.tensors, captured.sources, strict=True):
        assert bytes(memory[row.offset : row.offset + row.nbytes]) == wanted[row.path], source.shape


def test_each_snapshot_with_overlap_holds_the_state_of_its_call(cuda: FakeCuda, places: Path) -> None:
    root = Root.open(places, create=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seen = torch.zeros(3, dtype=torch.int64)
    state = {"model": model, "optimizer": optimizer, "seen": seen}
    wanted = []
    with FakeDaemon(root) as fake, ckptd.Client(root.path, daemon="attach", overlap=True) as client:
        work = register_optimizer_step_pre_hook(lambda *_: cuda.trainers.run())  # behind the client's own
        for step in range(4):
            cuda.may_wait.set()
            client.wait(60)
            wanted.append(expected_of(state))
            cuda.may_wait.clear()
            ticket = client.snapshot(step, state)
            seen += 1
            cuda.trainers.run()  # what a forward pass comes after
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            assert ticket.state == "copying"  # the step has not waited for the device
        cuda.may_wait.set()
        client.wait(60)
        work.remove()
        assert [held_in(*one) for one in fake.snapshots] == wanted
