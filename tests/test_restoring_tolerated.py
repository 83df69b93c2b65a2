"""What strict=False takes is told, and it is offered only where it helps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from round_trip import through_disk


def sgd(*sizes: int) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(size)) for size in sizes], 0.1)


def in_mid_epoch(batch: int) -> ckptd.ResumableLoader:
    loader = ckptd.ResumableLoader(DataLoader(torch.arange(20), batch_size=batch))  # type: ignore[arg-type]
    next(iter(loader))
    return loader


#: What is saved, what is live, and whether strict=False takes the one for the other.
FAULTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], bool]] = {
    "only live": (dict, lambda: {"x": torch.ones(1)}, True),
    "only stored": (lambda: {"x": sgd(1), "y": sgd(1)}, lambda: {"x": sgd(1)}, True),
    "shape": (lambda: torch.ones(2), lambda: torch.ones(3), True),
    "dtype": (lambda: torch.ones(2), lambda: torch.ones(2).half(), True),
    "array's dtype": (lambda: np.ones(2), lambda: np.ones(2, np.int8), True),
    "no array": (lambda: "text", lambda: np.ones(2), True),
    "kind": (lambda: "auto", lambda: (0.9, 0.99), True),
    "rounded": (lambda: 0.1, lambda: np.zeros(1, np.float32), True),
    "groups": (
        lambda: sgd(1, 2),
        lambda: torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "dampening": 0.5}], 0.1),
        False,
    ),
    "class": (lambda: sgd(1), lambda: torch.optim.Adam([nn.Parameter(torch.ones(1))]), True),
    "no number": (lambda: "text", lambda: torch.ones(1), False),
    "list and dict": (lambda: [1], lambda: {"a": 1}, False),
    "scheduler": (
        lambda: lr_scheduler.StepLR(sgd(1), 3),
        lambda: lr_scheduler.CosineAnnealingLR(sgd(1), 3),
        False,
    ),
    "batch size": (lambda: in_mid_epoch(4), lambda: in_mid_epoch(5), False),
    "number": (lambda: sgd(1, 1), lambda: sgd(1), False),
}


@pytest.mark.parametrize("case", FAULTS)
def test_strict_false_is_offered_where_it_takes_every_fault(tmp_path: Path, case: str) -> None:
    saved, live, takes = FAULTS[case]
    stored = through_disk(tmp_path, {"it": saved()})
    with pytest.raises(StateMismatch) as caught:
        apply_state({"it": live()}, copy.deepcopy(stored))
    assert caught.value.strict_only == takes
    assert caught.value.todo.endswith("or pass strict=False or only=[…]" if takes else "or pass only=[…]")
    assert copy.copy(caught.value).strict_only == takes
    if takes:
        apply_state({"it": live()}, stored, strict=False)
        return
    with pytest.raises(StateMismatch) as caught:
        apply_state({"it": live()}, stored, strict=False)
    assert not caught.value.strict_only and "strict=False" not in caught.value.todo


def test_one_fault_that_refuses_anyway_is_enough_to_offer_nothing(tmp_path: Path) -> None:
    stored = through_disk(tmp_path, {"a": torch.ones(2), "b": [1]})
    for strict in (True, False):
        with pytest.raises(StateMismatch) as caught:
            apply_state({"a": torch.ones(3), "b": {}}, copy.deepcopy(stored), strict=strict)
        assert "strict=False" not in str(caught.value)


def test_what_strict_false_takes_of_another_kind_is_told(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    stored = through_disk(
        tmp_path,
        {"betas": "auto", "x": 0.1, "t": 0.1, "a": np.ones(2), "b": "text", "f": torch.ones(2), "m": model},
    )
    live = {
        "betas": (0.9, 0.99), "x": np.zeros(1, np.float32), "t": torch.zeros((), dtype=torch.bfloat16),
        "a": np.ones(2, np.int8), "b": np.ones(2), "f": torch.ones(2).half(),
        "m": nn.Linear(1, 1, bias=False).double(),
    }  # fmt: skip
    report = apply_state(live, stored, strict=False)
    assert report.tolerated == [
        "state['betas'] is builtins.str in the checkpoint, builtins.tuple in the live state",
        "state['x'] is builtins.float 0.1 in the checkpoint, which float32 in the live state can't hold exactly",
        "state['t'] is builtins.float 0.1 in the checkpoint, which torch.bfloat16 in the live state can't hold exactly",
        "state['a'] is float64, live int8",
        "state['b'] is builtins.str in the checkpoint, numpy.ndarray in the live state",
        "state['f'] is torch.float32, live torch.float16",
        "state['m']['weight'] is torch.float32, live torch.float64",
    ]
    assert live["betas"] == "auto"


def test_what_goes_together_is_not_told(tmp_path: Path) -> None:
    stored = through_disk(tmp_path, {"n": 1, "best": None, "t": (1, 2), "x": 0.5})
    live = {"n": 0.5, "best": 0.3, "t": (), "x": np.zeros(1, np.float32)}
    assert apply_state(live, stored, strict=False).tolerated == []


def test_an_optimizer_without_names_says_that_strict_false_doesnt_help(tmp_path: Path) -> None:
    stored = through_disk(tmp_path, {"o": sgd(1, 1)})
    for strict in (True, False):
        with pytest.raises(
            StateMismatch, match="strict=False doesn't take it either: put the module into the"
        ):
            apply_state({"o": sgd(1)}, copy.deepcopy(stored), strict=strict)


class Net(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(3, 3))


def test_state_over_all_parameters_that_is_left_out_is_told_with_its_reason(tmp_path: Path) -> None:
    def job(order: str) -> dict[str, Any]:
        model = Net(order)
        return {"m": model, "o": torch.optim.LBFGS(model.parameters())}

    saved = job("ab")

    def closure() -> torch.Tensor:
        loss = sum((p - 1).square().sum() for p in saved["m"].parameters())
        saved["o"].zero_grad()
        loss.backward()
        return loss

    saved["o"].step(closure)
    live = job("ba")
    report = apply_state(live, through_disk(tmp_path, saved), strict=False)
    assert (report.missing, report.unused, live["o"].state) == ([], [], {})
    assert report.tolerated == [
        "state['o']: its state is one vector over all parameters, and they are not the same ones in the same order: it "
        "was left out"
    ]
