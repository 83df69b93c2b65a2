"""What epochs before left in attributes that aren't recorded is said by name at a resume, in any epoch and between two."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from torch.utils.data import IterableDataset, Sampler

from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from loader_trace import (
    BATCH,
    EPOCH,
    SAMPLES,
    Augmented,
    assert_exact,
    draws,
    loader,
    position,
    resume,
    seed,
    trace,
)


class Caching(Augmented):
    """Keeps what it drew: changed in the first epoch, only read later."""

    def __init__(self) -> None:
        self.cache: dict[int, float] = {}

    def __getitem__(self, index: int) -> Any:
        return index, self.cache.setdefault(index, random.random())


class Permuting(Sampler[int]):
    """Shuffles its own list of objects on and on."""

    def __init__(self) -> None:
        self.order, self.rng = list(map(Decimal, range(SAMPLES))), random.Random(1)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return map(int, list(self.order))


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(SAMPLES):
            self.seen.append(index)
            yield len(self.seen)


CACHING, PERMUTING = (lambda: loader(Caching())), (lambda: loader(sampler=Permuting()))
slow = pytest.mark.slow
KINDS: dict[str, tuple[Callable[[], ResumableLoader], str]] = {
    "dataset": (CACHING, "dataset.cache"),
    "sampler": (PERMUTING, "sampler.order"),
    "iterable": (lambda: loader(Stream()), "dataset.seen"),
}
WITH_WORKERS: dict[str, tuple[Callable[[], ResumableLoader], str]] = {
    "persistent": (lambda: loader(Caching(), num_workers=1, persistent_workers=True), "dataset.cache"),
    "sampler": (lambda: loader(sampler=Permuting(), num_workers=1), "sampler.order"),
}


def after_an_epoch(make: Callable[[], ResumableLoader]) -> Any:
    seed()
    running = make()
    for _ in running:
        draws()
    return position(running)


@pytest.mark.parametrize("kind", KINDS)
def test_between_two_epochs_it_is_said(kind: str) -> None:
    make, path = KINDS[kind]
    with pytest.warns(
        CheckpointWarning, match=f"fetching changes {path}, which isn't recorded: what earlier epochs"
    ):
        resumed = resume(make, after_an_epoch(make))
    with pytest.warns(CheckpointWarning, match=path):  # still, after one more cut
        resume(make, position(resumed))


@slow
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_between_two_epochs_of_workers_it_is_said(kind: str) -> None:
    make, path = WITH_WORKERS[kind]
    with pytest.warns(
        CheckpointWarning, match=f"fetching changes {path}, which isn't recorded: what earlier epochs"
    ):
        resume(make, after_an_epoch(make))


@pytest.mark.parametrize("cut", [EPOCH + 1, 2 * EPOCH + 1])
def test_in_a_later_epoch_that_only_reads_it_it_is_said(cut: int) -> None:
    _, positions = trace(CACHING, cut)
    assert positions[cut][0]["pass"]["changed"] == ""
    with pytest.warns(CheckpointWarning, match=r"dataset\.cache"):
        resume(CACHING, positions[cut])


class Record:
    def __init__(self, value: int) -> None:
        self.value = value


class Remembering(Permuting):
    """Keeps objects in a list that was empty; its order goes by them from the third index on."""

    def __init__(self) -> None:
        self.history: list[Record] = []

    def __iter__(self) -> Iterator[int]:
        yield from range(BATCH)
        self.history.append(Record(3))
        for index in range(BATCH, SAMPLES):
            yield (index + sum(record.value for record in self.history)) % SAMPLES


@pytest.mark.parametrize("batch", [BATCH, SAMPLES])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_what_a_sampler_came_to_keep_and_cannot_be_recorded_is_said(cut: int, batch: int) -> None:
    """Though no position was taken meanwhile, and though the order is the same so far."""

    def make() -> ResumableLoader:
        return loader(batch=batch, sampler=Remembering())

    running = make()
    list(running)
    batches = iter(running)
    for _ in range(min(cut, len(running))):
        next(batches)
    state = position(running)
    assert state[0]["unrecorded"] == ["sampler.history"]
    with pytest.warns(CheckpointWarning, match=r"fetching changes sampler\.history, which isn't recorded"):
        make().load_state_dict(state[0])


def test_a_position_of_before_that_has_no_such_list_is_said_too() -> None:
    _, positions = trace(lambda: loader(Stream()), EPOCH + 1)
    state, rng = positions[-1]
    del state["unrecorded"], state["pass"]["streams"]
    with pytest.warns(CheckpointWarning, match=r"dataset\.seen"):
        resume(lambda: loader(Stream()), (state, rng))


@slow
def test_what_workers_keep_ends_with_them() -> None:
    def make() -> ResumableLoader:
        return loader(Caching(), num_workers=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resume(make, after_an_epoch(make))


class Opening(Augmented):
    """Opens something at its first fetch, which then stays."""

    def __init__(self) -> None:
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or object()
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"num_workers": 1}, marks=slow), pytest.param({"num_workers": 2}, marks=slow),
                pytest.param({"num_workers": 2, "persistent_workers": True}, marks=slow)],
)  # fmt: skip
def test_what_is_opened_once_is_nothing_to_say(options: dict[str, Any]) -> None:
    """And a resumed run, which opens it again, stands where the other one stood."""
    assert_exact(lambda: loader(Opening(), **options), (1, 2, 3, 4, 5, 9), ahead=3)


class AtItsEnd(Permuting):
    def __init__(self) -> None:
        self.history: list[Record] = []

    def __iter__(self) -> Iterator[int]:
        yield from range(SAMPLES)
        self.history.append(Record(3))


def test_what_a_sampler_keeps_at_its_end_is_said() -> None:
    running = loader(batch=SAMPLES, sampler=AtItsEnd())
    list(running)
    assert running.state_dict()["unrecorded"] == ["sampler.history"]
