"""A sampler that draws on the way has a line of its own: whatever else draws, running it alone gives its order again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ckptd import ResumableLoader
from ckptd.loop.loader_line import line_of
from ckptd.loop.loader_memory import Memory
from ckptd.loop.loader_pass import Pass
from loader_trace import (
    SAMPLES,
    Augmented,
    WithOwnGenerators,
    assert_exact,
    draws,
    loader,
    plain,
    position,
    resume,
    seed,
    trace,
    train,
)

Draw = Callable[[Any], int]


class OnTheWay(Sampler[int]):
    """Draws at each step from a generator that the training loop, or the dataset, draws from too."""

    def __init__(self, draw: Draw, shared: Any = None) -> None:
        self.draw, self.shared = draw, shared

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield self.draw(self.shared)


class NoneTwice(OnTheWay):
    """As that, and remembers what it gave: no sample comes twice."""

    def __iter__(self) -> Iterator[int]:
        given: set[int] = set()
        while len(given) < SAMPLES:
            index = self.draw(self.shared)
            if index not in given:
                given.add(index)
                yield index


class Everything(NoneTwice):
    """From everything at once."""

    def __init__(self) -> None:
        super().__init__(self.sum, np.random.default_rng(1))
        self.rng, self.default = random.Random(2), torch.default_generator

    def sum(self, shared: np.random.Generator) -> int:
        drawn = [_python(None), _numpy(None), _torch(None), _held(shared), _held(self.rng)]
        return (sum(drawn) + int(torch.randint(SAMPLES, (), generator=self.default))) % SAMPLES


class Modulo(Augmented):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % SAMPLES)


class LikeItsSampler(Augmented):
    """Draws, without workers, from the generator that its sampler draws from."""

    def __init__(self, shared: Any) -> None:
        self.shared = shared

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.shared.random())


def _python(_: Any) -> int:
    return random.randrange(SAMPLES)


def _numpy(_: Any) -> int:
    return int(np.random.randint(SAMPLES))


def _torch(_: Any) -> int:
    return int(torch.randint(SAMPLES, ()))


def _held(shared: Any) -> int:
    return int(shared.random() * SAMPLES)


KINDS: dict[str, Callable[[], Any]] = {
    "python": lambda: OnTheWay(_python),
    "numpy": lambda: OnTheWay(_numpy),
    "torch": lambda: OnTheWay(_torch),
    "python's, held": lambda: OnTheWay(_held, random._inst),  # type: ignore[attr-defined]
    "numpy's, held": lambda: OnTheWay(_held, np.random.mtrand._rand),
    "own, the loop draws too": lambda: OnTheWay(_held, np.random.default_rng(3)),
    "no replacement": lambda: NoneTwice(_torch),
    "everything": Everything,
}
RANDOM: dict[str, Callable[[], Any]] = {
    "with replacement": lambda: RandomSampler(range(200), True, 70, torch.Generator()),
    "torch's, held": lambda: RandomSampler(range(200), True, 70, torch.default_generator),
    "again and again": lambda: RandomSampler(range(SAMPLES), False, 70, torch.Generator()),
}


def sampled(kind: str, batch: int, **options: Any) -> ResumableLoader:
    return loader(Modulo(), batch, sampler={**KINDS, **RANDOM}[kind](), **options)


@pytest.mark.parametrize(("kind", "batch"), [*((kind, 2) for kind in KINDS), ("everything", 1)])
def test_a_sampler_that_draws_on_the_way_goes_on_at_every_batch(kind: str, batch: int) -> None:
    steps = 2 * -(-SAMPLES // batch)
    assert_exact(lambda: sampled(kind, batch), steps=steps, ahead=steps, by="skip")


@pytest.mark.parametrize("kind", RANDOM)
def test_torchs_sampler_that_draws_on_the_way_goes_on_at_every_batch(kind: str) -> None:
    assert_exact(lambda: sampled(kind, 10), steps=14, ahead=14, by="skip")


def test_a_batch_sampler_that_draws_on_the_way_goes_on_at_every_batch() -> None:
    def make() -> ResumableLoader:
        return loader(batch=1, batch_sampler=BatchSampler(Everything(), 2, False))

    assert_exact(make, steps=12, ahead=12, by="skip")


def test_a_sampler_goes_on_whose_generator_the_dataset_draws_from() -> None:
    def make() -> ResumableLoader:
        shared = random.Random(4)
        return loader(LikeItsSampler(shared), 2, sampler=NoneTwice(_held, shared))

    assert_exact(make, steps=12, ahead=12, by="skip")


class AtOnce(OnTheWay):
    """A custom one that draws its whole order in its first step."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES).tolist()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_sampler_that_draws_at_once_gives_what_a_plain_loader_gives(workers: int, prefetch: int) -> None:
    options = {"num_workers": workers, "prefetch_factor": prefetch if workers else None}
    seen = []
    for wrap in (lambda of: of, ResumableLoader):
        seed()
        running = iter(wrap(DataLoader(range(SAMPLES), 2, sampler=AtOnce(_torch), **options)))
        seen.append([draws(), *map(plain, running), draws()])
    assert seen[0] == seen[1]


SAMPLERS: list[tuple[Any, bool]] = [
    (SequentialSampler(range(4)), False),
    (RandomSampler(range(4)), False),
    (RandomSampler(range(4), True, 40), False),
    (SubsetRandomSampler(range(4), torch.Generator()), False),
    (WeightedRandomSampler([1.0], 4, generator=torch.Generator()), False),
    (DistributedSampler(range(4), 2, 0), False),
    (BatchSampler(BatchSampler([1, 2], 2, False), 2, False), False),
    (RandomSampler(range(4), generator=torch.Generator()), True),
    (BatchSampler(RandomSampler(range(4), True, 40, torch.default_generator), 2, False), True),
    (OnTheWay(_torch), True),
]


@pytest.mark.parametrize(("sampler", "apart"), SAMPLERS)
def test_torchs_samplers_that_draw_at_once_need_no_line(sampler: Any, apart: bool) -> None:
    memory = Memory({"sampler": sampler})
    assert (line_of(sampler, Pass(memory.all(), {}, False), memory) is not None) == apart


def test_a_generator_that_was_put_in_anothers_place_counts_as_that_one_reseeded() -> None:
    """Else a resumed run, which finds one generator in that place, couldn't tell whose line it is to go on with."""
    sampler = OnTheWay(_held, random.Random(1))
    memory = Memory({"sampler": sampler})
    line, indices = line_of(sampler, Pass(memory.all(), {}, False), memory), iter(sampler)
    assert line is not None
    own, other = random.Random(1), random.Random(2)
    assert line.step(indices) == _held(own)
    sampler.shared = random.Random(2)
    assert line.step(indices) == _held(own)
    assert _held(sampler.shared) == _held(other)
    sampler.shared = np.random.default_rng(2)  # no generator of that kind has been there
    assert line.step(indices) == _held(np.random.default_rng(2))


@pytest.mark.parametrize("replaced", range(1, 4))
def test_a_run_goes_on_whose_loop_replaces_the_samplers_generator(replaced: int) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=OnTheWay(_held, random.Random(1)))

    seed()
    running, seen = make(), []
    for number, batch in enumerate(running, 1):
        seen.append(plain(batch))
        if number == replaced:
            running.sampler.shared = random.Random(77)
            at = position(running)
    following = [plain(batch) for batch in running]
    resumed = resume(make, at)
    assert [plain(batch)[0] for batch in resumed] == [batch[0] for batch in seen[replaced:]]
    assert [plain(batch)[0] for batch in resumed] == [batch[0] for batch in following]


def test_only_those_of_the_datasets_generators_are_read_that_the_sampler_holds() -> None:
    data = WithOwnGenerators()
    for sampler, held in (
        (OnTheWay(_held, data.python), ["dataset.python"]),
        (OnTheWay(_held, random.Random(1)), []),
    ):
        memory = Memory({"dataset": data, "sampler": sampler})
        line = line_of(sampler, Pass(memory.all(), {}, False), memory)
        assert line is not None
        assert list(line._shared) == held


def test_what_others_draw_from_a_samplers_generator_goes_on() -> None:
    sampler = OnTheWay(_held, random.Random(1))
    memory = Memory({"sampler": sampler})
    line, indices = line_of(sampler, Pass(memory.all(), {}, False), memory), iter(sampler)
    assert line is not None
    line.step(indices)
    _ = [sampler.shared.random() for _ in range(3)]
    stood = memory.draws()
    line.step(indices)
    assert memory.draws() == stood


def test_a_position_of_before_goes_on_as_it_was_drawn() -> None:
    of = Pass({}, {}, False, line=False)
    assert line_of(OnTheWay(_torch), of, Memory({})) is None


def test_a_run_that_is_interrupted_twice_goes_on() -> None:
    def make() -> ResumableLoader:
        return sampled("everything", 2)

    whole, positions = trace(make, 12)
    once, stood = resume(make, positions[2]), []
    assert list(train(once, 3, lambda _: stood.append(position(once)))) == whole[2:5]
    assert list(train(resume(make, stood[-1]), 7)) == whole[5:12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefetch", "persistent", "batch"), [(1, False, 2), (4, False, 2), (1, True, 2), (4, True, 1)]
)
def test_a_sampler_that_workers_run_ahead_goes_on_at_every_batch(
    prefetch: int, persistent: bool, batch: int
) -> None:
    steps = 2 * -(-SAMPLES // batch)

    def make() -> ResumableLoader:
        options = {"num_workers": 2, "prefetch_factor": prefetch, "persistent_workers": persistent}
        return sampled("everything", batch, **options)

    assert_exact(make, range(0, steps, 5 - 2 * batch), steps=steps, ahead=steps, by="skip")
