"""For tests: a job that is little more than its learning-rate schedule, and one maker for each that torch ships."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import ckptd

STEPS = 12

Schedule = Callable[[torch.optim.Optimizer], Any]


class Fading:
    """A factor with a state of its own: numbers, a list that grows, a generator."""

    def __init__(self, seed: int = 0) -> None:
        self.level, self.seen = 1.0, list[int]()
        self.rng = np.random.default_rng(seed)

    def __call__(self, epoch: int) -> float:
        self.level *= float(self.rng.uniform(0.8, 1.0))
        self.seen.append(epoch)
        return self.level


def _sequential(o: torch.optim.Optimizer) -> Any:
    warm = schedules.LinearLR(o, 0.1, total_iters=3)
    return schedules.SequentialLR(
        o, [warm, schedules.CosineAnnealingLR(o, 4), schedules.ExponentialLR(o, 0.8)], [3, 7]
    )


def _chained_of_sequential(o: torch.optim.Optimizer) -> Any:
    steps = schedules.SequentialLR(o, [schedules.StepLR(o, 2, 0.5), schedules.PolynomialLR(o, 5)], [5])
    return schedules.ChainedScheduler([steps, schedules.LambdaLR(o, Fading())])


def _chained(o: torch.optim.Optimizer) -> Any:
    return schedules.ChainedScheduler(
        [
            schedules.ConstantLR(o, 0.5, 3),
            schedules.ExponentialLR(o, 0.9),
            schedules.MultiStepLR(o, [4, 4, 9]),
        ]
    )


#: Class → what it is told apart by → how one is made. Every class of torch has to be here.
SCHEDULES: dict[type, dict[str, Schedule]] = {
    schedules.LambdaLR: {
        "function": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
        "object": lambda o: schedules.LambdaLR(o, Fading()),
        "one each": lambda o: schedules.LambdaLR(o, [Fading(1), lambda step: 0.9**step]),
    },
    schedules.MultiplicativeLR: {
        "function": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
        "object": lambda o: schedules.MultiplicativeLR(o, [Fading(1), Fading(2)]),
    },
    schedules.StepLR: {"": lambda o: schedules.StepLR(o, 3)},
    schedules.MultiStepLR: {"": lambda o: schedules.MultiStepLR(o, [2, 5, 5, 9])},
    schedules.ConstantLR: {"": lambda o: schedules.ConstantLR(o, 0.3, total_iters=4)},
    schedules.LinearLR: {"": lambda o: schedules.LinearLR(o, 0.1, 0.7, total_iters=7)},
    schedules.ExponentialLR: {"": lambda o: schedules.ExponentialLR(o, 0.83)},
    schedules.SequentialLR: {"": _sequential},
    schedules.PolynomialLR: {"": lambda o: schedules.PolynomialLR(o, 9, power=2.0)},
    schedules.CosineAnnealingLR: {
        "": lambda o: schedules.CosineAnnealingLR(o, 5, eta_min=0.001),  # beyond its period: it rises again
    },
    schedules.CosineAnnealingWarmRestarts: {
        "": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
        "longer each time": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    },
    schedules.ChainedScheduler: {"": _chained, "of sequential": _chained_of_sequential},
    schedules.ReduceLROnPlateau: {
        "min": lambda o: schedules.ReduceLROnPlateau(o, patience=1, cooldown=2, min_lr=[0.001, 0.0]),
        "max": lambda o: schedules.ReduceLROnPlateau(
            o, "max", patience=0, threshold=0.1, threshold_mode="abs"
        ),
    },
    schedules.CyclicLR: {
        "triangular2": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, 2, mode="triangular2"),
        "exp_range": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
        "function": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.9**x),
        "object": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Fading(), scale_mode="iterations"),
    },
    schedules.OneCycleLR: {
        "": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
        "three phases": lambda o: schedules.OneCycleLR(
            o, [0.2, 0.1], total_steps=STEPS + 1, three_phase=True, anneal_strategy="linear"
        ),
    },
    SWALR: {
        "cos": lambda o: SWALR(o, swa_lr=0.005, anneal_epochs=7),
        "linear": lambda o: SWALR(o, swa_lr=[0.005, 0.2], anneal_epochs=7, anneal_strategy="linear"),
    },
}


def shipped() -> set[type]:
    """Every scheduler class of the installed torch that one can make, found in torch and not in a list."""
    found = {schedules.ReduceLROnPlateau, *_below(schedules.LRScheduler)}
    for module in (schedules, torch.optim.swa_utils):
        found |= {each for each in vars(module).values() if isinstance(each, type) and _schedules(each)}
    return {each for each in found if each.__module__.startswith("torch.")} - _NOT_MADE


_NOT_MADE = {schedules.LRScheduler, schedules._LRScheduler, torch.optim.Optimizer}


def _below(kind: type) -> set[type]:
    return {found for each in kind.__subclasses__() for found in (each, *_below(each))}


def _schedules(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("step", "state_dict", "load_state_dict"))


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.85),
    "betas": lambda groups: torch.optim.AdamW(groups, lr=0.05),
}


class ScheduleJob:
    """Two groups of other rates; the schedule sees a metric that improves, stalls and gets worse."""

    def __init__(self, schedule: Schedule, optimizer: str = "momentum") -> None:
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
        made = OPTIMIZERS[optimizer](groups)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": made,
            "scheduler": schedule(made),
            "train": ckptd.TrainState(),
        }

    def run(self, until: str, after: Callable[[str, Any], None]) -> None:
        model, optimizer, scheduler, counters = self.state.values()
        while str(counters.step) != until:
            loss = model(torch.rand(4, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counters.step += 1
            metric = (math.sin(counters.step),) if isinstance(scheduler, schedules.ReduceLROnPlateau) else ()
            scheduler.step(*metric)
            after(str(counters.step), (loss.item(), scheduler.get_last_lr()))
