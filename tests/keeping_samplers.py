"""Samplers that keep something from epoch to epoch in containers, each in its own way; none has a state_dict."""

from __future__ import annotations

import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from loader_trace import SAMPLES


class Keeping(Sampler[int]):
    """Each gives SAMPLES indices."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __len__(self) -> int:
        return SAMPLES


class ShuffledList(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return iter(list(self.order))


class IteratedList(ShuffledList):
    """Its iterator runs over the list itself."""

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return iter(self.order)


class Replaced(ShuffledList):
    """Another list in each epoch, which the first, someone else's too, must not become."""

    def __init__(self) -> None:
        super().__init__()
        self.whose = {"first": self.order}

    def __iter__(self) -> Iterator[int]:
        self.order = self.rng.sample(self.order, SAMPLES)
        return iter([index if self.whose["first"][index] == index else 0 for index in self.order])


class MadeLate(Keeping):
    """Makes its attributes at the first use."""

    def __iter__(self) -> Iterator[int]:
        if not hasattr(self, "order"):
            self.order, self.epoch = list(range(SAMPLES)), 0
        self.epoch += 1
        self.rng.shuffle(self.order)
        return iter([(index + self.epoch) % SAMPLES for index in self.order])


class ShuffledArray(Keeping):
    def __init__(self) -> None:
        self.rng2 = np.random.default_rng(2)
        self.order, self.typed, self.raw = (
            np.arange(SAMPLES),
            array("i", range(SAMPLES)),
            bytearray(range(SAMPLES)),
        )

    def __iter__(self) -> Iterator[int]:
        self.rng2.shuffle(self.order)
        self.typed.append(self.typed.pop(0))
        self.raw.reverse()
        for a, b, c in zip(self.order.tolist(), self.typed, self.raw, strict=True):
            yield (a + b * c) % SAMPLES


class Permutation(Keeping):
    """A permutation of the permutation of the epoch before, and how often each index came, in place."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.order, self.seen = torch.arange(SAMPLES), torch.zeros(SAMPLES, dtype=torch.bfloat16)

    def __iter__(self) -> Iterator[int]:
        self.order = self.order[torch.randperm(SAMPLES, generator=self.generator)]
        for index in self.order.tolist():
            self.seen[index] += index
            yield int(self.seen[index]) % SAMPLES


class Queue(Keeping):
    """Taken from until it is empty, while it is iterated."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.queue = self.rng.sample(range(SAMPLES), SAMPLES)
        while self.queue:
            yield self.queue.pop()


class Endless(Keeping):
    """Taken from and filled, longer than an epoch."""

    def __init__(self) -> None:
        self.queue, self.table = [3 * index % 40 for index in range(40)], OrderedDict.fromkeys(range(5), 0)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            index = self.queue.pop(0)
            self.queue.append((index * 7 + 1) % 40)
            self.table.move_to_end(index % 5)
            yield (index + next(iter(self.table))) % SAMPLES


class Rotated(Keeping):
    def __init__(self) -> None:
        self.ring = deque(range(SAMPLES), maxlen=SAMPLES)

    def __iter__(self) -> Iterator[int]:
        self.ring.rotate(2)
        self.ring.append(self.ring[0])
        return iter(list(self.ring))


class Buckets(Keeping):
    """Lists of lists and a dict of them, also tuples, some growing."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: defaultdict[int, list[int]] = defaultdict(list)
        for index in range(9):
            self.buckets[index % 3].append(index)
        self.lists = [[index] * (index % 3) for index in range(12)]
        self.last: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[int]:
        for bucket in self.buckets.values():
            self.rng.shuffle(bucket)
        self.rng.choice(self.lists).append(1)
        self.rng.shuffle(self.lists)
        self.last = (*self.last[-2:], [self.rng.random()])
        for at in self.rng.sample(list(self.buckets), 3):
            yield from self.buckets[at]
        yield len(self.lists[0])
        yield int(self.last[-1][0] * SAMPLES)


class Weighted(Keeping):
    """Weights that the training loop changes, by what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = dict.fromkeys(range(SAMPLES), 1.0)
        self.counts: Counter[int] = Counter()

    def learn(self, indices: list[int]) -> None:
        for index in indices:
            self.weights[index] *= 1.5
            self.counts[index] += 1

    def __iter__(self) -> Iterator[int]:
        weights = [weight + self.counts[index] for index, weight in self.weights.items()]
        return iter(self.rng.choices(range(SAMPLES), weights, k=SAMPLES))


class Left(Keeping):
    """Sets of what is left and of what was done."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.done = set(range(4 * SAMPLES)), frozenset[int]()

    def __iter__(self) -> Iterator[int]:
        some = self.rng.sample(sorted(self.left), SAMPLES - 1)
        self.left -= set(some)
        self.done |= set(some)
        yield from (index % SAMPLES for index in some)
        yield len(self.done) % SAMPLES


class Scalars(Keeping):
    """Numbers as NumPy and torch give them, a seed sequence's too."""

    def __init__(self) -> None:
        self.order = list(np.random.default_rng(1).permutation(SAMPLES))
        self.best, self.loss = np.float32(0.5), torch.tensor(1.0)
        self.level: Any = 0

    def __iter__(self) -> Iterator[int]:
        self.order.append(self.order.pop(0))
        self.best, self.level = np.float32(self.best * 1.5), "high" if self.level == 0 else 0
        self.loss *= 2
        first = (int(self.loss) + int(self.best * 10) + len(str(self.level))) % SAMPLES
        return iter([first, *map(int, self.order[1:])])


KEEPING = (
    ShuffledList, IteratedList, Replaced, MadeLate, ShuffledArray, Permutation, Queue, Endless, Rotated, Buckets, Weighted,
    Left, Scalars,
)  # fmt: skip
