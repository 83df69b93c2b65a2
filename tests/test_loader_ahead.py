"""Other prefetching or workers in mid-epoch: a sampler is run to the position, not set to where it had been run ahead to."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from ckptd.loop.loader_ahead import differs
from loader_trace import position, resume

LENGTH = 12
ONE, FOUR = {"num_workers": 1, "prefetch_factor": 1}, {"num_workers": 1, "prefetch_factor": 4}
TWO: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2}
NONE: dict[str, Any] = {}


class OnTheWay(Sampler[int]):
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield self.rng.randrange(LENGTH)


class Queue(OnTheWay):
    def __init__(self) -> None:
        self.queue = list(range(LENGTH + 3))

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            self.queue.append(self.queue.pop(0))
            yield self.queue[-1] % LENGTH


class Epochs(OnTheWay):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(LENGTH), LENGTH)
        self.epoch += 1


class Replaced(OnTheWay):
    """Its next order is made on the way, or by the training loop."""

    def __init__(self) -> None:
        self.order = list(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        yield from list(self.order)


def torchs() -> Sampler[int]:
    return RandomSampler(range(LENGTH), True, 40, torch.Generator().manual_seed(3))


MAKERS: list[Callable[[], Any]] = [OnTheWay, Queue, Epochs, torchs]


def made(sampler: Callable[[], Any], options: dict[str, Any]) -> ResumableLoader:
    return ResumableLoader(DataLoader(range(LENGTH), 2, sampler=sampler(), **options))


def rest(loader: ResumableLoader, batches: Iterator[Any]) -> list[Any]:
    """What is left of the epoch, and the one after it."""
    return [batch.tolist() for batch in batches] + [batch.tolist() for batch in loader]


def cut(sampler: Callable[[], Any], options: dict[str, Any], loop: Callable[[Any], None]) -> tuple[Any, Any]:
    running = made(sampler, options)
    batches = iter(running)
    for _ in range(2):
        next(batches)
        loop(running.sampler)
    at = position(running)
    return at, rest(running, batches)


def nothing(_sampler: Any) -> None:
    pass


@pytest.mark.parametrize("sampler", MAKERS)
@pytest.mark.parametrize(("before", "after"), [(FOUR, ONE), (ONE, FOUR), (TWO, NONE), (NONE, TWO)])
def test_the_rest_of_the_epoch_and_the_next_are_the_same(
    sampler: Callable[[], Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    at, whole = cut(sampler, before, nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        resumed = resume(lambda: made(sampler, after), at)
    assert rest(resumed, iter(resumed)) == whole


def test_what_the_loop_draws_from_the_samplers_generator_stays_drawn() -> None:
    at, whole = cut(OnTheWay, FOUR, lambda sampler: sampler.rng.random())
    assert at[0]["pass"]["apart"] == ["sampler.rng"]
    resumed = resume(lambda: made(OnTheWay, ONE), at)
    assert rest(resumed, iter(resumed)) == whole


def test_what_the_loop_puts_in_the_place_of_the_samplers_list_stays_there() -> None:
    def mine(sampler: Any) -> None:
        sampler.order = [(3 * index + 1) % LENGTH for index in sampler.order]

    at, whole = cut(Replaced, FOUR, mine)
    resumed = resume(lambda: made(Replaced, ONE), at)
    assert rest(resumed, iter(resumed)) == whole


@pytest.mark.parametrize("sampler", [OnTheWay, torchs])
def test_other_prefetching_is_not_said_where_generators_alone_decide(sampler: Callable[[], Any]) -> None:
    at, _ = cut(sampler, FOUR, nothing)
    resume(lambda: made(sampler, ONE), at)


def test_other_prefetching_is_said_where_the_loop_may_have_changed_what_the_sampler_keeps() -> None:
    def mine(sampler: Any) -> None:
        sampler.order[0] = 7

    at, _ = cut(Replaced, ONE, mine)
    with pytest.warns(CheckpointWarning, match=r"given 4 batches ahead, 1 in .*sampler\.order changed"):
        resume(lambda: made(Replaced, FOUR), at)
    resume(lambda: made(Replaced, ONE), at)


@pytest.mark.parametrize(
    ("stored", "live", "other"),
    [
        (FOUR, ONE, True),
        (TWO, FOUR, False),
        ({"workers": 1}, ONE, False),
        ({"workers": 2}, ONE, True),
        ({"workers": 0}, NONE, False),
        ({"workers": "x", "prefetch": 2}, ONE, True),
    ],
)
def test_it_counts_how_many_batches_are_read_ahead(stored: Any, live: Any, other: bool) -> None:
    def kind(options: Any) -> Any:
        named = {"num_workers": "workers", "prefetch_factor": "prefetch"}
        return {named.get(name, name): value for name, value in options.items()}

    assert differs(kind(stored), {"workers": 0, **kind(live)}) == other
