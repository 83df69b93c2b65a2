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
from torch.utils.data import DataLoader, IterableDataset

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


SEEN = {"samples": 0}


def counts_in_the_loop() -> Job:
    """Two counts are forgotten, and the one that nobody uses is easier to see."""
    SEEN["samples"] = 0
    seed()
    state = build()
    del state["scheduler"]
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), 0.1)

    def losses() -> Iterator[Tensor]:
        steps = 0
        while True:
            for batch in state["loader"]:
                steps += 1
                SEEN["samples"] += len(batch)
                state["optimizer"].param_groups[0]["lr"] = 0.1 / steps
                state["optimizer"].zero_grad()
                loss: Tensor = state["model"](batch).square().mean()
                loss.backward()
                state["optimizer"].step()
                yield loss

    return state, losses()


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.ema = torch.optim.swa_utils.AveragedModel(model)


def averages_for_later() -> Job:
    """What is shipped in the end is the average; training itself never looks at it."""
    SEEN["samples"] = 0
    seed()
    state = build()
    trainer = Trainer(state["model"])

    def losses() -> Iterator[Tensor]:
        for loss in train(state):
            trainer.ema.update_parameters(state["model"])
            SEEN["samples"] += BATCH
            yield loss

    return state, losses()


class Shuffled(IterableDataset[Tensor]):
    """A stream through a buffer, from which it is drawn."""

    def __init__(self) -> None:
        self.at, self.held, self.begun = 0, list[float](), True

    def __iter__(self) -> Iterator[Tensor]:
        if self.begun:
            self.at, self.held, self.begun = 0, [], False
        while self.at < 60:
            self.held.append(self.at / 60)
            self.at += 1
            if len(self.held) > 5:
                yield torch.full((4,), self.held.pop(random.randrange(6)) + 0.001 * SEEN["samples"])
        self.begun = True


class Positioned(Shuffled):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "held": list(self.held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.held, self.begun = state["at"], list(state["held"]), False


class Counted(Positioned):
    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            SEEN["samples"] += 1
            yield sample


def streams(dataset: Shuffled) -> Job:
    SEEN["samples"] = 0
    seed()
    state = build()
    state["loader"] = ckptd.ResumableLoader(DataLoader(dataset, BATCH))
    return state, train(state)


def stream_with_a_state() -> Job:
    return streams(Positioned())


def stream_that_is_fetched_again() -> Job:
    return streams(Shuffled())


def stream_with_a_state_that_counts_in_a_global() -> Job:
    return streams(Counted())
