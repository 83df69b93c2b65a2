"""Iterable datasets: with a state_dict they go on from it, without one or in workers they are fetched again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckptd import ResumableLoader, capture_rng_state
from loader_trace import BATCH, SAMPLES, Augmented, assert_exact, loader, plain, position, resume, seed, train


class Stream(IterableDataset[Any]):
    """Shared out over the workers; draws after its last sample too."""

    def __init__(self) -> None:
        self.rng = random.Random(4)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in range(first, SAMPLES, step):
            yield index, random.random(), float(torch.rand(())), self.rng.random()
        random.random(), self.rng.random()


class Sized(Stream):
    def __len__(self) -> int:
        return SAMPLES


class OneWorkerOnly(Stream):
    """Its second worker draws and gives nothing."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        noise = random.random() + self.rng.random()
        if info is None or info.id == 0:
            yield from ((index, noise, random.random()) for index in range(SAMPLES))


class Stateful(IterableDataset[Any]):
    """Goes on from where its attributes say."""

    def __init__(self) -> None:
        self.at = 0
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        while self.at < SAMPLES:
            self.at += 1
            yield self.at, random.random(), self.rng.random()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Noted(IterableDataset[Any]):
    """Keeps what was loaded until it begins, as torchdata's do."""

    def __init__(self) -> None:
        self.yielded = 0
        self.go_on: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.yielded, self.go_on = self.go_on or 0, None
        for index in range(self.yielded, SAMPLES):
            self.yielded += 1
            yield index, random.random()

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.go_on = state["yielded"]


class Buffered(IterableDataset[Any]):
    """A shuffle buffer: what it draws for one batch comes out in a later one. Draws from all global generators."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for index in range(SAMPLES):
            buffer.append((index, float(np.random.random())))
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


class BufferedOnTheWay(DataLoader[Any]):
    """A shuffle buffer of batches, in the loader."""

    def __iter__(self) -> Any:
        held: list[Any] = []
        for batch in super().__iter__():
            held.append(batch)
            if len(held) > 2:
                yield held.pop(random.randrange(3))
        yield from held


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_subclass_that_draws_in_its_own_iter_goes_on_beside_a_loop_that_draws(workers: int) -> None:
    assert_exact(
        lambda: ResumableLoader(BufferedOnTheWay(Augmented(), BATCH, shuffle=True, num_workers=workers))
    )


def test_a_buffer_draws_otherwise_in_each_epoch_and_moves_no_global_generator() -> None:
    seed()
    running = loader(Buffered(), generator=torch.Generator())
    before = repr(capture_rng_state())
    first, second = list(running), list(running)
    assert repr(first) != repr(second)
    assert repr(capture_rng_state()) == before


KINDS = {"buffered": Buffered, "stream": Stream, "sized": Sized, "stateful": Stateful, "noted": Noted}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_iterable_dataset_goes_on_at_every_batch_of_three_epochs(kind: str, drop_last: bool) -> None:
    by = "refetch" if kind in ("buffered", "stream", "sized") else "load"
    assert_exact(lambda: loader(KINDS[kind](), drop_last=drop_last), by=by)


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterable_dataset_without_batches_goes_on(kind: str) -> None:
    assert_exact(lambda: loader(KINDS[kind](), batch=None), steps=25)


def test_a_dataset_with_a_state_dict_is_not_fetched_again() -> None:
    def make() -> Any:
        return loader(Stateful())

    seed()
    running = make()
    list(train(running, 3))
    resumed = resume(make, position(running))
    state = resumed.dataset.rng.bit_generator.state
    iter(resumed)
    assert (resumed.dataset.rng.bit_generator.state, resumed.dataset.at) == (state, 9)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("kind", "drop_last"), [(Stream, True), (Sized, False), (OneWorkerOnly, False), (Noted, False)]
)
def test_an_iterable_dataset_in_workers_goes_on(kind: Any, drop_last: bool, persistent: bool) -> None:
    def make() -> Any:
        options = {"num_workers": 2, "persistent_workers": persistent, "drop_last": drop_last}
        return loader(kind(), batch=2, **options)

    ends = len(list(make()))
    assert_exact(make, (1, ends, ends + 1, 2 * ends), steps=2 * ends + 3, ahead=3, by="refetch")


@pytest.mark.slow
def test_an_iterable_dataset_in_persistent_workers_goes_on_without_batches() -> None:
    def make() -> Any:
        return loader(Sized(), batch=None, num_workers=2, persistent_workers=True)

    assert_exact(make, (5, 11, 13), steps=20, ahead=3)


@pytest.mark.slow
def test_persistent_workers_of_an_iterable_dataset_go_on_between_two_epochs() -> None:
    """Only the whole epoch before leaves them as they were: it is fetched again."""

    def make() -> Any:
        return loader(Stream(), batch=2, drop_last=True, num_workers=2, persistent_workers=True)

    seed()
    running = make()
    for _ in range(2):
        list(running)
    cut = position(running)
    assert (running.epoch, cut[0]["pass"]) == (2, None)
    whole = list(train(running, 6))
    resumed = resume(make, cut)
    again = position(resumed)
    for one in (resumed, resume(make, again)):
        assert one.epoch == 2
    resumed = resume(make, cut)
    assert list(train(resumed, 6)) == whole


@pytest.mark.slow
def test_torchs_count_of_samples_is_not_confused() -> None:
    """It warns of more samples than len() said; the greetings of workers are none."""
    running = loader(Sized(), batch=None, num_workers=2, persistent_workers=True)
    assert len(running) == SAMPLES
    assert len(list(running)) == SAMPLES


class Announced(IterableDataset[int]):
    """Its subclasses have to say more than that they are."""

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name


class OfAName(Announced, name="one"):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.slow
def test_a_dataset_whose_class_wants_more_of_subclasses_is_iterated_in_workers() -> None:
    running = loader(OfAName(), num_workers=1, persistent_workers=True)
    assert [plain(list(running)) for _ in range(2)] == [[[0, 1, 2], [3]]] * 2


class Around(IterableDataset[int]):
    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner or range(4))


@pytest.mark.slow
def test_a_dataset_around_another_of_its_class_is_iterated_in_workers() -> None:
    running = loader(Around(Around()), num_workers=1, persistent_workers=True)
    assert plain(list(running)) == [[0, 1, 2], [3]]
