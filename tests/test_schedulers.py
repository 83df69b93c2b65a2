"""Field case 23: every learning-rate schedule that torch ships goes on at every cut as if uninterrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptd
from ckptd.errors import UnstorableState
from ckptd.tensors.restoring import apply_state
from sweep_run import Sweep
from sweep_schedule import OPTIMIZERS, SCHEDULES, STEPS, Fading, ScheduleJob, shipped

MADE = [(kind, name) for kind, names in SCHEDULES.items() for name in names]
MOVES_MOMENTUM = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)


def test_every_schedule_of_this_torch_is_swept() -> None:
    assert {kind.__name__ for kind in shipped()} == {kind.__name__ for kind in SCHEDULES}
    assert len(shipped()) >= 16


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # by SequentialLR itself in torch 2.6
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), MADE, ids=[f"{kind.__name__} {name}".strip() for kind, name in MADE]
)
def test_rates_and_momentum_are_those_of_the_uninterrupted_run_at_every_cut(
    kind: type, name: str, tmp_path: Path
) -> None:
    for optimizer in OPTIMIZERS if kind in MOVES_MOMENTUM else ("momentum",):
        (folder := tmp_path / optimizer).mkdir()
        whole = Sweep(lambda o=optimizer: ScheduleJob(SCHEDULES[kind][name], o), folder, STEPS)  # type: ignore[misc]
        whole.whole()
        assert len({shown["optimizer.0.'lr'"] for shown in whole.trace.values()}) > 1
        for cut in whole.cuts:
            whole.check(cut)
        whole.check("1", "2", "5", "6", "11")


def over(*arguments: Any, schedule: Callable[..., Any] = lr_scheduler.LambdaLR) -> dict[str, Any]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return {"scheduler": schedule(optimizer, *arguments)}


class Bare:
    """A callable that has no __dict__ to give."""

    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 1.0

    def __call__(self, step: int) -> float:
        self.level *= 0.9
        return self.level


def test_a_schedule_over_an_object_whose_state_torch_cant_give_is_refused_by_key_path(tmp_path: Path) -> None:
    for function in (Bare(), [Bare()], abs):
        with pytest.raises(UnstorableState, match=r"state\['scheduler'\].*state_dict\(\) failed"):
            ckptd.save(tmp_path / "refused", over(function), step=1)
    assert not (tmp_path / "refused").exists()


class Holding(Fading):
    """A factor that holds something no file can."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lambda: 1


def test_a_schedule_over_an_object_that_holds_a_function_is_refused_by_key_path(tmp_path: Path) -> None:
    with pytest.raises(
        UnstorableState, match=r"state\['scheduler'\]\['lr_lambdas'\]\[0\]\['inner'\].*function"
    ):
        ckptd.save(tmp_path / "refused", over(Holding()), step=1)


def test_capturing_a_schedule_over_an_object_leaves_it_alone(tmp_path: Path) -> None:
    state = over(fading := Fading())
    before = (fading.level, list(fading.seen), fading.rng.bit_generator.state)
    ckptd.save(tmp_path / "c", state, step=1)
    assert (fading.level, fading.seen, fading.rng.bit_generator.state) == before
    assert state["scheduler"].lr_lambdas == [fading]


def test_functions_are_not_stored_and_those_of_the_resumed_script_count(tmp_path: Path) -> None:
    """As in torch: a function is code, and code comes from the script."""
    ckptd.save(tmp_path / "c", over(lambda step: 0.5), step=1)
    live = over(lambda step: 0.25)
    apply_state(live, ckptd.load(tmp_path / "c"))
    live["scheduler"].optimizer.step()
    live["scheduler"].step()
    assert live["scheduler"].get_last_lr() == [0.1 * 0.25]


class Steered:
    """State behind a bound method: torch stores none of it, so it is a component of its own."""

    def __init__(self) -> None:
        self.level = 1.0

    def factor(self, step: int) -> float:
        self.level *= 0.9
        return self.level

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_state_behind_a_bound_method_goes_on_when_its_object_is_in_the_state(tmp_path: Path) -> None:
    def rates(state: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            state["scheduler"].optimizer.step()
            state["scheduler"].step()
            found += state["scheduler"].get_last_lr()
        return found

    def make() -> dict[str, Any]:
        steered = Steered()
        return {**over(steered.factor), "steered": steered}

    whole = rates(make(), 8)
    first = make()
    assert rates(first, 3) == whole[:3]
    ckptd.save(tmp_path / "c", first, step=3)
    second = make()
    second["scheduler"].optimizer.param_groups[0]["lr"] = 7.0
    apply_state(second, ckptd.load(tmp_path / "c"))
    assert rates(second, 5) == whole[3:]
