"""What makes steps and loads wait for copies, and the steps that nothing can make wait."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.tensors import accumulation, step_gate
from ckptd.tensors.capture import capture
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.overlap import Overlap
from ckptd.tensors.step_gate import StepGate


class Noted:
    """A copy that notes who waited for it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def let_go(self) -> None:
        self.calls.append("let go")

    def wait(self, timeout_s: float | None = None) -> bool:
        self.calls.append("wait")
        return True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    """The process's gate, in use, and open to all again afterwards."""
    monkeypatch.setattr(step_gate.gate, "deaf", "")
    monkeypatch.setattr(accumulation._watch, "blind", False)  # compiled steps make it so, for good
    step_gate.gate.enter()
    yield step_gate.gate
    step_gate.gate.leave()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_every_step_and_load_waits_until_the_copy_is_dropped(gate: StepGate) -> None:
    model, held = nn.Linear(3, 3), Noted()
    optimizer = stepped(model, torch.optim.SGD(model.parameters()))
    gate.hold(held, [model])
    model.load_state_dict(model.state_dict())
    optimizer.step()
    optimizer.step()
    assert held.calls == ["let go"] * 3
    gate.drop(held)
    optimizer.step()
    assert held.calls == ["let go"] * 3


def test_modules_carry_a_hook_from_the_snapshot_to_the_next_step_only(gate: StepGate) -> None:
    model, held = nn.Linear(3, 3), Noted()
    optimizer = stepped(model, torch.optim.SGD(model.parameters()))
    gate.hold(held, [model])
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert len(model._load_state_dict_pre_hooks) == 1
    gate.drop(held)
    assert (
        len(model._load_state_dict_pre_hooks) == 1
    )  # another thread drops it, while a module may be loading
    optimizer.step()
    assert len(model._load_state_dict_pre_hooks) == 0


def test_the_last_to_leave_takes_the_hooks_along(gate: StepGate) -> None:
    model, held = nn.Linear(3, 3), Noted()
    optimizer = stepped(model, torch.optim.SGD(model.parameters()))
    gate.enter()
    gate.leave()
    gate.hold(held, [model])
    gate.leave()
    optimizer.step()
    gate.drop(held)
    assert held.calls == []
    assert len(model._load_state_dict_pre_hooks) == 0
    gate.enter()


def compiled_steps(optimizer: torch.optim.Optimizer) -> list[Any]:
    @torch.compile(backend="eager")
    def loop() -> None:
        optimizer.step()

    return [torch.compile(optimizer.step, backend="eager"), loop]


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("which", [0, 1])
def test_a_step_that_is_compiled_waits_once_and_makes_later_snapshots_copy_at_once(
    gate: StepGate, which: int
) -> None:
    torch._dynamo.reset()
    model, held = nn.Linear(3, 3), Noted()
    optimizer = stepped(model, torch.optim.SGD(model.parameters(), foreach=True))
    step = compiled_steps(optimizer)[which]
    gate.leave()
    step()  # compiled while nobody listens
    gate.enter()
    assert gate.deaf == ""
    gate.hold(held)
    before = model.weight.detach().clone()
    step()
    assert not torch.equal(before, model.weight)
    assert set(held.calls) == {"wait"}
    gate.drop(held)
    assert gate.deaf.startswith("torch.compile took")
    overlap = Overlap()
    state = {"model": model, "optimizer": optimizer}
    assert overlap.beside(state, capture(state), CopyThreads(0)) is None
    assert overlap.beside(state, capture(state), CopyThreads(0)) is None
    notes = overlap.take_notes()
    overlap.close()
    assert len(notes) == 1
    assert "copied before the next step begins, from now on: torch.compile" in notes[0]


def test_a_step_in_a_cuda_graph_waits_once_and_makes_later_snapshots_copy_at_once(
    gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model, held = nn.Linear(3, 3), Noted()
    gate.hold(held)
    stepped(model, torch.optim.SGD(model.parameters()))
    gate.drop(held)
    assert held.calls[0] == "wait"
    assert gate.deaf.startswith("a CUDA graph captured")
