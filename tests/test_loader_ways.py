"""Which way leads to the position, that it is said, and which loaders are refused because there is none."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning, InvalidArgument
from ckptd.loop.loader_attributes import MAX_HOLDERS
from loader_trace import (
    SAMPLES,
    Augmented,
    Remembering,
    assert_exact,
    loader,
    plain,
    position,
    resume,
    seed,
    trace,
    train,
)


class Keeping(Augmented):
    """keep(index) is called at each fetch."""

    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)

    def __getitem__(self, index: int) -> Any:
        self.keep(index)
        return index, float(torch.rand(()))

    def keep(self, index: int) -> None:
        raise NotImplementedError


class AFile(Keeping):
    def keep(self, index: int) -> None:
        self.fd = index  # was None: a file descriptor, which isn't recorded


class Listing(Keeping):
    def keep(self, index: int) -> None:
        self.seen.append(index)


class Caching(Keeping):
    def keep(self, index: int) -> None:
        self.cache[index] = index


class InATensor(Keeping):
    def keep(self, index: int) -> None:
        self.tensor[index] += 1


class InAnArray(Keeping):
    def keep(self, index: int) -> None:
        self.array[index] += 1


class Anew(Keeping):
    def keep(self, index: int) -> None:
        self.object = threading.Lock()


class Once(Keeping):
    def keep(self, index: int) -> None:
        self.file = self.file or threading.Lock()


def way(data: Any, batches: int = 2) -> str:
    running = loader(data)
    for batch, _ in enumerate(running, 1):
        if batch == batches:
            break
    return running.resumes_by


def test_a_dataset_that_keeps_nothing_is_skipped() -> None:
    assert way(Augmented()) == "skip: the order and every generator are known without fetching"


@pytest.mark.parametrize(
    ("data", "attribute"),
    [
        (lambda: AFile(fd=None), "fd"),
        (lambda: Listing(seen=[]), "seen"),
        (lambda: Listing(seen=list(range(1000))), "seen"),
        (lambda: Caching(cache={}), "cache"),
        (lambda: InATensor(tensor=torch.zeros(SAMPLES)), "tensor"),
        (lambda: InAnArray(array=torch.zeros(SAMPLES).numpy()), "array"),
        (lambda: Anew(object=None), "object"),
    ],
)
def test_what_fetching_leaves_in_a_dataset_makes_it_be_fetched_again_and_is_named(
    data: Any, attribute: str
) -> None:
    assert way(data()).startswith(f"refetch: fetching changes dataset.{attribute},")


def test_what_is_opened_at_the_first_fetch_and_stays_is_no_reason() -> None:
    assert way(Once(file=None)).startswith("skip")
    assert way(Once(file=None), 1).startswith("refetch")  # whether it stays isn't known yet


@pytest.mark.filterwarnings("ignore:fetching changes dataset.previous:ckptd.CheckpointWarning")
def test_fetching_again_brings_back_what_the_last_fetch_left() -> None:
    assert_exact(lambda: loader(Remembering(), shuffle=True), range(1, 4), steps=5)


@pytest.mark.parametrize(("at", "reason"), [(3, "training loop draws"), (5, "earlier epochs")])
def test_what_fetching_again_may_not_bring_back_is_said(at: int, reason: str) -> None:
    def make() -> ResumableLoader:
        return loader(Remembering())

    _, positions = trace(make, 6)
    with pytest.warns(CheckpointWarning, match=f"fetching changes dataset.previous.*{reason}"):
        iter(resume(make, positions[at]))


class RememberingLate(Augmented):
    def __init__(self) -> None:
        self.previous = torch.zeros(())

    def __getitem__(self, index: int) -> Any:
        mixed = torch.rand(()) + self.previous
        if index > 4:
            self.previous = mixed
        return index, mixed


def test_what_is_changed_later_than_in_the_first_batch_is_said_too() -> None:
    def make() -> ResumableLoader:
        return loader(RememberingLate(), 2)

    _, positions = trace(make, 4)
    with pytest.warns(CheckpointWarning, match=r"fetching changes dataset\.previous.*training loop draws"):
        iter(resume(make, positions[4]))


def test_the_way_taken_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    _, positions = trace(loader, 2)
    resumed = resume(loader, positions[2])
    assert (resumed.resumed_by, "resuming" in repr(resumed)) == ("", True)
    with caplog.at_level(logging.INFO, "ckptd.loop.loader_resume"):
        iter(resumed)
    assert resumed.resumed_by.startswith("skip: ")
    assert "loader.resumed by=skip batches=2" in caplog.text
    assert repr(resumed) == "<ResumableLoader epoch=0 batch=2 resumes_by=skip>"


class Doubled(DataLoader[Any]):
    """A subclass that yields something else than its batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield "half", plain(batch)
            yield "other half", plain(batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_subclass_with_its_own_iter_is_gone_through_again(workers: int) -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(Doubled(Augmented(), 6, num_workers=workers))

    whole, positions = [], []
    seed()
    running = make()
    for batch in running:
        whole.append(batch)
        positions.append(position(running))
    for cut in (0, 2):
        resumed = resume(make, positions[cut])
        assert list(resumed) == whole[cut + 1 :]
        assert resumed.resumed_by == "refetch: Doubled has its own __iter__"


class Part(Augmented):
    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.random()


def test_a_dataset_of_many_parts_is_looked_into() -> None:
    data = [Part() for _ in range(60)]
    assert_exact(lambda: loader(ConcatDataset(copy.deepcopy(data)), 30, shuffle=True), steps=6, by="skip")


def test_a_dataset_of_too_many_parts_is_said_and_fetched_again() -> None:
    data = ConcatDataset([Part() for _ in range(MAX_HOLDERS + 1)])
    with pytest.warns(CheckpointWarning, match="too many to look into"):
        running = loader(data, 1000)
    next(iter(running))
    assert running.resumes_by.startswith("refetch: dataset and samplers hold over")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def test_the_ways_of_iterable_datasets_are_said() -> None:
    assert way(Stream()) == "refetch: the iterable dataset has no state_dict"


class OwnPosition(DataLoader[Any]):
    """As torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class OwnIterator(DataLoader[Any]):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator = super().__iter__()


@pytest.mark.parametrize(
    ("make", "where", "todo"),
    [
        (lambda: [1, 2, 3], "loader: not a DataLoader", ""),
        (lambda: DataLoader(Augmented(), num_workers=1, in_order=False), "in_order", "with in_order=True"),
        (lambda: OwnPosition(Augmented()), "keeps its own position", "put it into the state itself"),
        (lambda: OwnIterator(Augmented()), "loader.iterator", "persistent_workers=True"),
        (
            lambda: Doubled(Augmented(), num_workers=1, persistent_workers=True),
            "persistent_workers",
            "with persistent_workers=False",
        ),
    ],
)
def test_a_loader_that_cannot_be_resumed_exactly_is_refused_with_what_to_do(
    make: Any, where: str, todo: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ResumableLoader(make())
    assert where in str(caught.value)
    assert todo in str(caught.value)


def test_in_order_means_nothing_without_workers() -> None:
    assert len(list(train(loader(in_order=False), 2))) == 2
