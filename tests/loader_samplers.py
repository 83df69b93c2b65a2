"""Samplers of every temper: eager and lazy, with generators of their own, with and without a state_dict."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from loader_trace import SAMPLES


class _Sized(Sampler[int]):
    def __len__(self) -> int:
        return SAMPLES


class Eager(_Sized):
    """Draws its order from torch's global generator in iter(), and counts epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(index + self.epoch) % SAMPLES for index in torch.randperm(SAMPLES).tolist()])


class Counting(_Sized):
    """Draws nothing; its order depends on how many epochs it has seen."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        for index in range(SAMPLES):
            yield index * (self.epoch % 10 + 1) % SAMPLES


class Lazy(_Sized):
    """Draws at each step from a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield self.rng.randrange(SAMPLES)


class NewGenerator(_Sized):
    """Makes its generator anew in each epoch, as DistributedSampler does."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch)
        self.epoch += 1
        yield from torch.randperm(SAMPLES, generator=self.generator).tolist()


class Positioned(_Sized):
    """Its state_dict is a position, which the iter() after load_state_dict goes on from (torchdata's way)."""

    def __init__(self) -> None:
        self.yielded, self.epoch = 0, 0
        self.go_on: int | None = None

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        self.yielded, self.go_on = self.go_on or 0, None
        for index in order[self.yielded :]:
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.go_on = state["yielded"]


class Shuffling(_Sized):
    """Shuffles a list again and again, in place; only its state_dict has it."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class LazyGlobal(_Sized):
    """Draws at each step from a global generator, and remembers nothing."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)


class LazyInPairs(_Sized):
    """Draws from a global generator for two steps at a time, so that a draw still matters a step later."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES // 2 + 1):
            yield from (random.randrange(SAMPLES), random.randrange(SAMPLES))


class SeededLate(_Sized):
    """Draws its seed when it is first begun."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.seed is None:
            self.seed = random.randrange(2**31)
        self.epoch += 1
        return iter(random.Random(self.seed + self.epoch).sample(range(SAMPLES), SAMPLES))


CUSTOM = (SeededLate, Eager, Counting, Lazy, LazyGlobal, LazyInPairs, NewGenerator, Positioned, Shuffling)
