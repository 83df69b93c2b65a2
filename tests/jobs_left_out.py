"""Jobs for check_resume that leave one thing out of their state, or take numbers from where no seed reaches."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ckptd
from jobs_exact import BATCH, Noisy, build, one_step, seed, train

Job = tuple[dict[str, Any], Iterator[Any]]


def beside(more: Callable[[], float]) -> Job:
    """The exact job, with a number of something beside its state added to each loss."""
    seed()
    state = build()

    def losses() -> Iterator[float]:
        for loss in train(state):
            yield loss.item() + more()

    return state, losses()


def wrapped_loader() -> Job:
    seed()
    state = build()
    loader = state.pop("loader")

    def losses() -> Iterator[Tensor]:
        while True:
            for batch in loader:
                yield one_step(state, batch)

    return state, losses()


def scaler() -> Job:
    """Its scale decides here which steps overflow, and so the weights."""
    seed()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grown = torch.amp.GradScaler("cpu", init_scale=2.0**122, growth_interval=2)

    def losses() -> Iterator[Tensor]:
        while True:
            optimizer.zero_grad()
            loss = model(torch.rand(BATCH, 4)).square().mean()
            grown.scale(loss * 100).backward()
            grown.step(optimizer)
            grown.update()
            yield loss

    return {"model": model, "optimizer": optimizer}, losses()


def torch_generator() -> Job:
    noise = torch.Generator().manual_seed(3)
    return beside(lambda: float(torch.rand((), generator=noise)))


def numpy_generator() -> Job:
    noise = np.random.default_rng(3)
    return beside(lambda: float(noise.random()))


def numpy_random_state() -> Job:
    noise = np.random.RandomState(3)
    return beside(lambda: float(noise.random_sample()))


def python_generator() -> Job:
    noise = random.Random(3)
    return beside(noise.random)


@dataclass(slots=True)
class Slotted:
    count: int = 0
    best: float = field(init=False)

    def next(self) -> float:
        self.count += 1
        return float(self.count)


def object_with_slots() -> Job:
    counter = Slotted()
    return beside(lambda: counter.next())


def counting_iterator() -> Job:
    steps = itertools.count()
    return beside(lambda: float(next(steps)))


def _added_to(values: list[float]) -> float:
    values[0] += 1.0
    return values[0]


def partial() -> Job:
    return beside(functools.partial(_added_to, [0.0]))


def loader_in_a_container() -> Job:
    """Exact: it is in the state, a level down."""
    seed()
    state = build()
    state["data"] = {"train": state.pop("loader")}

    def losses() -> Iterator[Tensor]:
        while True:
            for batch in state["data"]["train"]:
                yield one_step(state, batch)

    return state, losses()


def accumulates_by_its_own_count() -> Job:
    seed()
    state = build()

    def losses() -> Iterator[Tensor]:
        while True:
            for number, batch in enumerate(state["loader"]):
                loss: Tensor = state["model"](batch).square().mean()
                loss.backward()
                if number % 2:
                    state["optimizer"].step()
                    state["optimizer"].zero_grad()
                yield loss

    return state, losses()


class SystemNoise(Noisy):
    def __init__(self) -> None:
        self.system = random.SystemRandom()

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.system.random()


def draws_from_the_system() -> Job:
    seed()
    state = build()
    state["loader"] = ckptd.ResumableLoader(DataLoader(SystemNoise(), BATCH))
    return state, train(state)


def seeds_from_the_system() -> Job:
    seed()
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    state = build()
    return state, train(state)


def generator_without_a_seed() -> Job:
    noise = np.random.default_rng()
    return beside(lambda: float(noise.random()))
