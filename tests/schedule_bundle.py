"""For tests: every schedule there is, each over an optimizer of its own, all in one state that steps together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from sweep_schedule import OPTIMIZERS, SCHEDULES, Fading, Schedule
from sweep_trace import told

#: Over 13 steps each crosses its milestones, restarts and ends of cycles.
STEPS = 13


def _warm(o: torch.optim.Optimizer) -> Any:
    return schedules.LinearLR(o, 0.1, total_iters=3)


def _warm_then(o: torch.optim.Optimizer, *after: Any) -> Any:
    return schedules.SequentialLR(o, [_warm(o), *after], list(range(3, 3 + 4 * len(after), 4)))


def _sequential_of_chained(o: torch.optim.Optimizer) -> Any:
    chained = schedules.ChainedScheduler([_warm(o), schedules.ExponentialLR(o, 0.9)])
    return schedules.SequentialLR(
        o, [chained, schedules.CosineAnnealingLR(o, 3), schedules.LambdaLR(o, Fading())], [4, 8]
    )


def _chained_of_sequential(o: torch.optim.Optimizer) -> Any:
    inner = _warm_then(o, schedules.CosineAnnealingLR(o, 4), schedules.ExponentialLR(o, 0.7))
    return schedules.ChainedScheduler([inner, schedules.ExponentialLR(o, 0.95)])


def _sequential_of_sequential(o: torch.optim.Optimizer) -> Any:
    inner = _warm_then(o, schedules.CosineAnnealingLR(o, 4))
    return schedules.SequentialLR(o, [inner, schedules.PolynomialLR(o, 6)], [6])


#: Beyond those of SCHEDULES. "by fractions" steps by a third of an epoch.
MORE: dict[str, Schedule] = {
    "warmed restarts": lambda o: _warm_then(o, schedules.CosineAnnealingWarmRestarts(o, 2, T_mult=2)),
    "warmed cosine": lambda o: _warm_then(o, schedules.CosineAnnealingLR(o, 3)),
    "warmed steps": lambda o: _warm_then(o, schedules.StepLR(o, 2, 0.5), schedules.MultiStepLR(o, [1, 3, 3])),
    "chained in sequential": _sequential_of_chained,
    "sequential in chained": _chained_of_sequential,
    "sequential in sequential": _sequential_of_sequential,
    "restarts by fractions": lambda o: schedules.CosineAnnealingWarmRestarts(o, 1, T_mult=2),
    "chained restarts": lambda o: schedules.ChainedScheduler(
        [schedules.CosineAnnealingWarmRestarts(o, 3), schedules.ExponentialLR(o, 0.9)]
    ),
}

ALL: dict[str, Schedule] = MORE | {
    f"{kind.__name__} {name}".strip(): make
    for kind, names in SCHEDULES.items()
    for name, make in names.items()
}


class Bundle:
    """All of them, in groups of two rates.

    Args:
        rates: What these are: None for numbers, else the tensors' dtype.
        one: Whether both groups have one tensor, as torch makes them of one that it is given for all.
        but: Which are left out.
    """

    def __init__(
        self, rates: torch.dtype | None = None, *, one: bool = False, but: frozenset[str] = frozenset()
    ) -> None:
        self.step, self._one = 0, one
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, Any] = {}
        for name, make in ALL.items():
            for optimizer in ("momentum", "betas") if "Cycl" in name or "OneCycle" in name else ("momentum",):
                if (key := f"{name} {optimizer}") not in but:
                    self.optimizers[key] = self._optimizer(optimizer, rates)
                    self.schedulers[key] = make(self.optimizers[key])

    def _optimizer(self, kind: str, rates: torch.dtype | None) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.05, 0.02)]
        made = OPTIMIZERS[kind](groups)
        for group in made.param_groups if rates else ():
            group["lr"] = torch.tensor(group["lr"], dtype=rates)
            if self._one:
                group["lr"] = made.param_groups[0]["lr"]
        return made

    def state(self, *, schedulers_first: bool = False) -> dict[str, Any]:
        parts = {"optimizers": self.optimizers, "schedulers": self.schedulers}
        return dict(reversed(parts.items())) if schedulers_first else parts

    def run(self, until: int) -> dict[int, dict[str, Any]]:
        """Step → name → every group's rate, momentum and betas and the schedule's last rates, to the bit."""
        trace = {}
        while self.step < until:
            self.step += 1
            for name, scheduler in self.schedulers.items():
                self.optimizers[name].step()
                scheduler.step(*self._given(name, scheduler))
            trace[self.step] = self.shown()
        return trace

    def _given(self, name: str, scheduler: Any) -> tuple[float, ...]:
        if "by fractions" in name:
            return (self.step / 3,)
        return (math.sin(self.step),) if isinstance(scheduler, schedules.ReduceLROnPlateau) else ()

    def shown(self) -> dict[str, Any]:
        return {
            name: [
                [number(group["lr"]), group.get("momentum"), group.get("betas")]
                for group in self.optimizers[name].param_groups
            ]
            + [number(rate) for rate in scheduler.get_last_lr()]
            for name, scheduler in self.schedulers.items()
        }

    def told(self) -> dict[str, str]:
        """The whole state to the bit, in its kinds, and which tensors are one: path → path of the first."""
        found, first = told(self.state()), dict[int, str]()
        for name, optimizer in self.optimizers.items():
            groups = [{**group, "params": ()} for group in optimizer.param_groups]
            for path, tensor in _tensors([groups, self.schedulers[name].state_dict()], name):
                found[f"one: {path}"] = first.setdefault(tensor.data_ptr(), path)
        return found

    def turned(self) -> frozenset[str]:
        """Those whose rate was a tensor at first and is a number now."""
        return frozenset(
            name
            for name, optimizer in self.optimizers.items()
            if not all(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
        )


def number(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) else value)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{path}.{key}")
