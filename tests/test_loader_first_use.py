"""Generators that are made at their first use have a place in a loader made anew, or are named as not recorded."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from keeping_samplers import Keeping
from loader_trace import EPOCH, SAMPLES, loader, plain

Make = Callable[[], ResumableLoader]


class InSlots:
    __slots__ = ("missing", "none")

    def __init__(self) -> None:
        self.none: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        if self.none is None:
            self.none, self.missing = random.Random(3), random.Random(4)
        for _ in range(SAMPLES):
            yield (self.none.randrange(SAMPLES) + self.missing.randrange(SAMPLES)) % SAMPLES


class InACell(Keeping):
    def __init__(self) -> None:
        rng: Any = None

        def draw() -> int:
            nonlocal rng
            rng = rng or random.Random(5)
            return int(rng.randrange(SAMPLES))

        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        return (self.draw() for _ in range(SAMPLES))


def in_a_class() -> Any:
    class InAClass(Keeping):
        rng: Any = None

        def __init__(self) -> None:
            pass

        def __iter__(self) -> Iterator[int]:
            kind = type(self)
            kind.rng = kind.rng or random.Random(6)
            return (kind.rng.randrange(SAMPLES) for _ in range(SAMPLES))

    return InAClass()


def run(of: ResumableLoader, epochs: int, cuts: list[Any]) -> list[Any]:
    seen = []
    while of.epoch < epochs:
        cuts.append(copy.deepcopy(of.state_dict()))
        for indices, *_ in of:
            seen.append(plain(indices))
            cuts.append(copy.deepcopy(of.state_dict()))
        cuts.pop()
    return seen


@pytest.mark.parametrize("sampler", [InSlots, InACell, in_a_class])
def test_one_in_a_slot_a_cell_or_a_class_goes_on(sampler: Any) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=sampler())

    cuts: list[Any] = []
    seen, used = run(make(), 2, cuts), make()
    for at in (1, 3, 4, 6, 2, 0, 5):
        for resumed in (make(), used):
            resumed.load_state_dict(cuts[at])
            assert run(resumed, 2, []) == seen[at:], f"cut at {at}"


def test_one_in_a_slot_is_there_no_more_after_going_back_to_before() -> None:
    of = loader(sampler=InSlots())
    start = copy.deepcopy(of.state_dict())
    list(of)
    of.load_state_dict(start)
    assert of.sampler.none is None and not hasattr(of.sampler, "missing")


class Appending(Keeping):
    """One more generator in each epoch; the order is the same up to the second index."""

    def __init__(self) -> None:
        self.streams: Any = [random.Random(0)]

    def __iter__(self) -> Iterator[int]:
        self.streams.append(random.Random(len(self.streams)))
        for index in range(SAMPLES):
            yield self.streams[index % len(self.streams)].randrange(SAMPLES)


class FromASeed(Appending):
    """In the place of a number."""

    def __init__(self) -> None:
        self.streams = 7

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.streams, int):
            self.streams = random.Random(self.streams)
        return (self.streams.randrange(SAMPLES) for _ in range(SAMPLES))


@pytest.mark.parametrize("kind", [Appending, FromASeed])
def test_one_without_a_place_is_named_and_put_nowhere_else(kind: type[Appending]) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=kind())

    cuts: list[Any] = []
    seen = run(make(), 2, cuts)
    first = make()
    first.load_state_dict(cuts[2])  # in the first epoch it is made again
    assert run(first, 1, []) == seen[2:EPOCH]
    resumed = make()
    with pytest.warns(CheckpointWarning, match=r"fetching changes sampler\.streams.* which isn't recorded"):
        resumed.load_state_dict(cuts[6])
    assert list(vars(resumed.sampler)) == ["streams"]
