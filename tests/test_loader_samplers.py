"""Any sampler and batch sampler: the order goes on, and is come to without fetching wherever that is exact."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import loader_samplers as samplers
from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from loader_trace import (
    BATCH,
    SAMPLES,
    Augmented,
    assert_exact,
    draws,
    loader,
    plain,
    position,
    resume,
    seed,
    trace,
)

MakeSampler = Callable[[], Any]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


TORCH: dict[str, MakeSampler] = {
    "replacement": lambda: RandomSampler(range(SAMPLES), True, 40, generator()),
    "replacement, global generator": lambda: RandomSampler(range(SAMPLES), True, 40),
    "more samples than there are": lambda: RandomSampler(range(SAMPLES), False, 3 * SAMPLES, generator()),
    "subset": lambda: SubsetRandomSampler(range(2, 10), generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
}
KINDS: dict[str, MakeSampler] = {**TORCH, **{kind.__name__: kind for kind in samplers.CUSTOM}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_goes_on_at_every_batch_of_three_epochs(kind: str) -> None:
    assert_exact(lambda: loader(sampler=KINDS[kind]()), by="skip")


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_sampler_around_it_goes_on_too(kind: str) -> None:
    def make() -> ResumableLoader:
        return loader(batch=1, batch_sampler=BatchSampler(KINDS[kind](), BATCH, drop_last=True))

    assert_exact(make, by="skip")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind.__name__ for kind in samplers.CUSTOM])
def test_a_sampler_that_runs_ahead_of_workers_goes_on(kind: str) -> None:
    def make() -> ResumableLoader:
        return loader(sampler=KINDS[kind](), num_workers=1, prefetch_factor=3)

    assert_exact(make, (1, 3, 4, 6), ahead=3, by="skip")


class Buckets(Sampler[list[int]]):
    """A batch sampler with batches of different sizes, drawn lazily from its own generator."""

    def __init__(self) -> None:
        self.rng = torch.Generator()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        for size in torch.randperm(4, generator=self.rng).tolist():
            yield torch.randint(SAMPLES, (size + 1,), generator=self.rng).tolist()


def test_a_batch_sampler_with_batches_of_different_sizes_goes_on() -> None:
    assert_exact(lambda: loader(batch=1, batch_sampler=Buckets()), by="skip")


def test_a_sampler_without_batches_goes_on() -> None:
    assert_exact(lambda: loader(batch=None, sampler=samplers.Lazy()), steps=25, by="skip")


def distributed() -> ResumableLoader:
    return loader(sampler=DistributedSampler(range(SAMPLES), num_replicas=2, rank=1, seed=3))


def test_a_distributed_sampler_goes_on_when_set_epoch_is_called_before_each_epoch() -> None:
    def run(of: ResumableLoader, epochs: int, cuts: list[Any]) -> list[Any]:
        seen = []
        while of.epoch < epochs:
            of.sampler.set_epoch(of.epoch)
            for batch in of:
                seen.append((plain(batch), draws()))
                cuts.append(position(of))
        return seen

    seed()
    cuts: list[Any] = []
    whole = run(distributed(), 4, cuts)
    for done, cut in enumerate(cuts[:-1], 1):
        assert run(resume(distributed, cut), 4, []) == whole[done:]


class DrawsNothing(Dataset[int]):
    def __init__(self) -> None:
        self.fetched = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.fetched += 1
        return index


class CountsFetches(Augmented):
    def __init__(self) -> None:
        self.fetched = 0

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        return super().__getitem__(index)


class GoesByFetches(Sampler[int]):
    def __init__(self, data: CountsFetches) -> None:
        self.data = data

    def __iter__(self) -> Any:
        for _ in range(SAMPLES):
            yield self.data.fetched * 4 % SAMPLES


def test_a_sampler_that_goes_by_what_was_fetched_is_refetched() -> None:
    def make() -> ResumableLoader:
        data = CountsFetches()
        return loader(data, sampler=GoesByFetches(data))

    assert_exact(make, (3, 7), by="refetch: the sampler alone gives another order")


class Forgetful(samplers.Shuffling):
    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.order = [Decimal(index) for index in range(SAMPLES)]

    def __iter__(self) -> Any:
        return map(int, super().__iter__())


@pytest.mark.filterwarnings("ignore:fetching changes sampler")  # said at once; the order, where it is seen
def test_a_sampler_with_a_list_of_objects_is_said_when_its_order_comes_out_different() -> None:
    def make() -> ResumableLoader:
        return loader(sampler=Forgetful())

    _, positions = trace(make, 8)
    resumed = resume(make, positions[2])
    next(iter(resumed))  # in the first epoch it starts as it was made: nothing to say
    with pytest.warns(CheckpointWarning, match="other indices"):
        iter(resume(make, positions[6]))


class AsKind(Forgetful):
    """Gives indices of another kind than int."""

    def __init__(self, kind: Callable[[int], Any]) -> None:
        super().__init__()
        self.kind = kind

    def __iter__(self) -> Any:
        return map(self.kind, super().__iter__())


class AnyKind(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return 0


@pytest.mark.filterwarnings("ignore:fetching changes sampler")  # said at once; the order, where it is seen
@pytest.mark.parametrize(
    "kind",
    [
        np.int64,
        torch.tensor,
        lambda n: (n, 1),
        lambda n: [np.int32(n)],
        str,
        lambda n: {"n": n},
        lambda n: {n},
    ],
)
def test_another_order_is_said_whatever_the_indices_are(kind: Callable[[int], Any]) -> None:
    def make() -> ResumableLoader:
        return loader(AnyKind(), sampler=AsKind(kind))

    _, positions = trace(make, 8)
    with pytest.warns(CheckpointWarning, match="other indices"):
        iter(resume(make, positions[6]))


def test_skipping_fetches_nothing() -> None:
    def make() -> ResumableLoader:
        return loader(DrawsNothing(), shuffle=True)

    _, positions = trace(make, 4)
    resumed = resume(make, positions[3])
    before = resumed.dataset.fetched
    batches = iter(resumed)
    assert (resumed.dataset.fetched, resumed.resumed_by) == (before, resumed.resumes_by)
    assert len(next(batches)) == SAMPLES % BATCH
