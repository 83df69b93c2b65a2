"""Snapshots of CUDA tensors, on a machine that has CUDA: right, and without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.snapshot.mapped_memory import MappedMemory
from ckptd.snapshot.slots import Slot
from ckptd.tensors.capture import capture
from ckptd.tensors.pinned_memory import pin
from ckptd.tensors.state_copy import copy_at_once
from ckptd_places import places
from fake_daemon import FakeDaemon
from held_copies import expected_of, held_in

__all__ = ["places"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def fake(places: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(Root.open(places, create=True)) as fake:
        yield fake


def training(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 512, device="cuda")).square().mean().backward()
    optimizer.step()


def busy() -> None:
    """Keep the trainer's stream busy for some 0.1 s: whoever doesn't wait for it reads too early."""
    torch.cuda._sleep(100_000_000)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_each_snapshot_holds_the_state_of_its_call(
    places: Path, fake: FakeDaemon, overlap: bool, options: dict[str, Any]
) -> None:
    model, optimizer = training(**options)
    strided = torch.arange(1e6, device="cuda").reshape(1000, 1000)[:, ::2]
    state = {"model": model, "optimizer": optimizer, "strided": strided, "host": torch.ones(5)}
    wanted = []
    with ckptd.Client(places, daemon="attach", overlap=overlap, start_timeout_s=5.0) as client:
        for number in range(6):
            wanted.append(expected_of(state))
            busy()
            client.snapshot(number, state)
            strided += 1
            step(model, optimizer)
        client.wait(30)
    assert [held_in(*one) for one in fake.snapshots] == wanted


def test_snapshot_with_overlap_returns_while_the_device_is_busy(places: Path, fake: FakeDaemon) -> None:
    model, optimizer = training(fused=True)
    state = {"model": model, "optimizer": optimizer}
    with ckptd.Client(places, daemon="attach", overlap=True, start_timeout_s=5.0) as client:
        client.snapshot(1, state).wait(timeout_s=30)  # pins the slot
        client.snapshot(2, state).wait(timeout_s=30)
        model.zero_grad()
        busy()
        ticket = client.snapshot(3, state)
        assert not torch.cuda.current_stream().query()
        optimizer.step()  # waits on the device, not here
        assert not torch.cuda.current_stream().query()
        ticket.wait(timeout_s=30)


def test_a_slot_is_pinned_until_it_is_closed(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path / "slot", 1 << 20)
    assert pin(slot.data)
    whole = torch.frombuffer(slot.data, dtype=torch.uint8)
    assert whole.is_pinned()
    del whole
    slot.close()
    again = Slot.open(tmp_path / "slot")
    assert pin(again.data)
    again.close()


def test_memory_that_cannot_be_pinned_is_copied_to_all_the_same() -> None:
    mapping = MappedMemory(-1, 1 << 20)
    view = memoryview(mapping)
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    assert int(torch.cuda.cudart().cudaHostRegister(address, 1 << 20, 0)) == 0
    assert not pin(view)  # it is registered already
    captured = capture({"x": torch.arange(1000, device="cuda")})
    copy_at_once(captured, view[: captured.data_bytes])
    assert torch.arange(1000, device="cuda").sum().item() == 499500  # no error was left behind
    torch.cuda.cudart().cudaHostUnregister(address)
