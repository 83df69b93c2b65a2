"""Worker processes: their generators go on, nothing is fetched again, and all else is as with a bare DataLoader."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from ckptd.loop.loader_worker import Shipped
from dead_workers import deaf_to_children
from fake_daemon import wait_until
from loader_trace import (
    EPOCH,
    SAMPLES,
    Augmented,
    Remembering,
    Seeded,
    WithoutTorchs,
    WithOwnGenerators,
    assert_exact,
    draws,
    loader,
    plain,
    position,
    resume,
    seed,
    set_up,
    trace,
    train,
)

__all__ = ["deaf_to_children"]

pytestmark = pytest.mark.slow


class AtOnce(Augmented):
    """Fetches a batch in one call, and minds being asked for none."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, indices[0], self.rng.random()) for index in indices]


class Counted:
    """A collate_fn with a counter and a generator."""

    def __init__(self) -> None:
        self.calls, self.rng = 0, random.Random(2)

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        return [sample[0] for sample in samples], self.calls, self.rng.random(), random.random()


class MadeAtFirstUse(Augmented):
    def __init__(self) -> None:
        self.rng: random.Random | None = None

    def __getitem__(self, index: int) -> Any:
        if self.rng is None:
            self.rng = random.Random(torch.initial_seed())
        return index, self.rng.random()


class Seldom(Augmented):
    """Draws from each generator only now and then, so that most batches bring no news of it."""

    def __init__(self) -> None:
        self.rng, self.seen = random.Random(1), 0

    def __getitem__(self, index: int) -> Any:
        self.seen += index == 0
        noise = (random.random(), self.rng.random()) if index < 3 else (float(torch.rand(())), 0.0)
        return index, *noise, self.seen


class InATensor(Augmented):
    """A state_dict of more than one element: no bool tells whether it changed."""

    def __init__(self) -> None:
        self.mean, self.last = torch.zeros(3), np.zeros(2)

    def __getitem__(self, index: int) -> Any:
        self.mean, self.last = self.mean * 0.9 + index, self.last + index
        return index, self.mean.sum(), self.last.sum()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "last": [self.last.copy()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.last = state["mean"].clone(), state["last"][0].copy()


class MadeOfItsBatches(Augmented):
    """Gets one item by way of several."""

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, random.random()) for index in indices]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(99)


KINDS: dict[str, Callable[[], ResumableLoader]] = {
    "own generators": lambda: loader(WithOwnGenerators(), num_workers=2, shuffle=True, generator=generator()),
    "subset": lambda: loader(Subset(WithOwnGenerators(), range(SAMPLES)), num_workers=2, prefetch_factor=1),
    "at once": lambda: loader(AtOnce(), num_workers=2, drop_last=True, shuffle=True),
    "seeded": lambda: loader(Seeded(), num_workers=2),
    "no batches": lambda: loader(WithOwnGenerators(), batch=None, num_workers=2, shuffle=True),
    "a list": lambda: loader(list(range(SAMPLES)), num_workers=2, shuffle=True),
    "replacement": lambda: loader(sampler=RandomSampler(range(9), True, 11, generator()), num_workers=2),
    "collate_fn": lambda: loader(collate_fn=Counted(), num_workers=2, shuffle=True),
    "seldom": lambda: loader(Seldom(), num_workers=2),
    "state_dict of tensors": lambda: loader(InATensor(), num_workers=2),
    "items made of batches": lambda: loader(MadeOfItsBatches(), num_workers=2),
    "items made of batches, no batches": lambda: loader(MadeOfItsBatches(), batch=None, num_workers=2),
    "made at first use": lambda: loader(MadeAtFirstUse(), num_workers=2, shuffle=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_go_on_without_fetching_again(kind: str) -> None:
    """Cuts: the first batch, an epoch's last but one, its last, its edge, in the third epoch."""
    assert_exact(KINDS[kind], (1, 3, 4, 5, 10), ahead=2, by="skip")


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_and_prefetching_goes_on_at_every_batch(workers: int, prefetch: int) -> None:
    assert_exact(
        lambda: loader(shuffle=True, num_workers=workers, prefetch_factor=prefetch),
        range(1, EPOCH + 2), steps=EPOCH + 3, ahead=2, by="skip",
    )  # fmt: skip


def test_a_run_cut_twice_in_one_epoch_sees_the_same() -> None:
    make = KINDS["own generators"]
    whole, positions = trace(make, 7)
    first = resume(make, positions[5])
    seen = list(train(first, 1))
    assert seen + list(train(resume(make, position(first)), 1)) == whole[5:7]


def test_a_cut_between_the_iterator_and_its_first_batch_sees_the_same() -> None:
    make = KINDS["own generators"]
    seed()
    running = make()
    batches = iter(running)
    draws()
    cut = position(running)
    whole = [plain(batch) for batch in batches]
    assert [plain(batch) for batch in resume(make, cut)] == whole


def test_a_wrapped_loader_gives_what_the_bare_one_does() -> None:
    def bare() -> DataLoader[Any]:
        return DataLoader(WithOwnGenerators(), 3, shuffle=True, num_workers=2)

    seed()
    running = bare()
    wanted = [(plain(batch), draws()) for _ in range(2) for batch in running]
    seed()
    assert list(train(ResumableLoader(bare()), 8)) == wanted


def test_a_dataset_in_workers_that_keeps_something_unrecorded_is_fetched_again() -> None:
    def make() -> ResumableLoader:
        return loader(Remembering(), num_workers=2, shuffle=True)

    assert_exact(make, (1, 2, 3, 6), steps=8, ahead=2, by="refetch: fetching changes dataset.previous")


class Opening(Augmented):
    """Opens something at its first fetch, which then stays."""

    def __init__(self) -> None:
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or threading.Lock()
        return super().__getitem__(index)


def test_what_a_worker_opens_at_its_first_fetch_makes_nothing_be_fetched_again() -> None:
    def make() -> ResumableLoader:
        return loader(Opening(), batch=2, num_workers=2)

    _, positions = trace(make, 5)
    resumed = resume(make, positions[5])
    next(iter(resumed))
    assert resumed.resumed_by.startswith("skip")


def test_the_users_worker_init_fn_sees_its_own_dataset_and_runs_first() -> None:
    assert_exact(
        lambda: loader(WithOwnGenerators(), num_workers=2, worker_init_fn=set_up), (3,), steps=5, by="skip"
    )


def test_workers_that_are_spawned_go_on() -> None:
    def make() -> ResumableLoader:
        return loader(
            WithoutTorchs(), num_workers=1, shuffle=True, worker_init_fn=set_up, multiprocessing_context="spawn"
        )  # fmt: skip

    assert_exact(make, (2,), steps=3, by="skip")


def test_another_number_of_workers_gives_the_same_samples_and_says_so() -> None:
    def make(workers: int) -> ResumableLoader:
        return loader(num_workers=workers, shuffle=True)

    for before, after in ((0, 2), (2, 0), (2, 1)):
        whole, positions = trace(lambda before=before: make(before), 6)  # type: ignore[misc]
        with pytest.warns(CheckpointWarning, match="num_workers"):
            resumed = resume(lambda after=after: make(after), positions[5])  # type: ignore[misc]
        assert next(iter(resumed))[0].tolist() == whole[5][0][0]


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise ValueError("sample 4 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_sample_arrives_as_with_a_bare_loader_and_the_loop_may_go_on(workers: int) -> None:
    def make() -> ResumableLoader:
        return loader(Failing(), num_workers=workers)

    running = make()
    batches = iter(running)
    next(batches)
    with pytest.raises(ValueError, match="sample 4 is broken"):
        next(batches)
    assert running.batch_in_epoch == 1
    cut = position(running)
    wanted = [plain(batch) for batch in batches]
    assert [row[0] for row in wanted] == [[6, 7, 8], [9, 10]]
    assert [plain(batch) for batch in resume(make, cut)] == wanted  # with what was drawn before the error


class Dying(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.usefixtures("deaf_to_children")
def test_a_worker_that_dies_is_said_as_with_a_bare_loader() -> None:
    batches = iter(loader(Dying(), num_workers=1))
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(batches)


class Interrupting(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise KeyboardInterrupt
        return index


def test_ctrl_c_leaves_the_position_before_the_batch_it_interrupted() -> None:
    running = loader(Interrupting(), num_workers=0)
    with pytest.raises(KeyboardInterrupt):
        list(running)
    assert running.batch_in_epoch == 1


def test_ctrl_c_that_the_loop_goes_on_after_leaves_out_the_batch_it_interrupted() -> None:
    running = loader(Interrupting(), num_workers=0)
    batches = iter(running)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert plain(next(batches)) == [6, 7, 8]
    whole = Subset(Interrupting(), [*range(4), 3, *range(5, SAMPLES)])
    assert plain(next(iter(resume(lambda: loader(whole), position(running))))) == [9, 10]


class Waiting(Augmented):
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            with self.lock:
                pass
        return index


def test_an_error_of_waiting_for_a_batch_is_not_a_batchs_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's timeout, a signal's handler: the batch still comes."""
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    running = loader(Waiting(lock), num_workers=1, timeout=200)
    batches: Any = iter(running)
    next(batches)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="timed out"):
        patch.setattr(batches._source, "_timeout", 0.2)
        next(batches)
    assert plain(next(iter(resume(loader_of_numbers, position(running))))) == [3, 4, 5]
    lock.release()
    assert plain(next(batches)) == [3, 4, 5]
    assert [plain(batch) for batch in resume(loader_of_numbers, position(running))] == [[6, 7, 8], [9, 10]]


def loader_of_numbers() -> ResumableLoader:
    lock = multiprocessing.get_context("fork").Lock()
    return loader(Waiting(lock), num_workers=1)


@pytest.mark.usefixtures("deaf_to_children")
def test_a_worker_that_died_has_not_finished_the_epoch() -> None:
    running = loader(Dying(), num_workers=1, prefetch_factor=1)
    batches = iter(running)
    next(batches)
    for end in (RuntimeError, StopIteration):
        with pytest.raises(end):
            next(batches)
        assert (running.epoch, running.batch_in_epoch, running.state_dict()["pass"]["steps"]) == (0, 1, 1)


@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_the_loop_or_the_loader_ends_the_workers(persistent: bool) -> None:
    others = set(multiprocessing.active_children())
    running = loader(num_workers=2, persistent_workers=persistent)
    for _ in running:
        break
    # What doesn't leave within five seconds is told to by torch, and not waited for.
    wait_until(lambda: len(set(multiprocessing.active_children()) - others) == (2 if persistent else 0))
    del running
    wait_until(lambda: set(multiprocessing.active_children()) <= others)


class Pinned:
    """Stands in for a batch that knows how to be pinned; there is no accelerator here."""

    def pin_memory(self) -> str:
        return "pinned"


def test_pin_memory_reaches_the_batch_and_leaves_what_came_along() -> None:
    memory = {"globals": {"python": ["python", 3, b"x", None]}}
    pinned = pin_memory(Shipped(Pinned(), 1, memory, ["a"], False))
    assert isinstance(pinned, Shipped)
    assert pinned == Shipped("pinned", 1, memory, ["a"], False)


def test_the_users_loader_is_not_changed() -> None:
    bare = DataLoader(WithOwnGenerators(), 3, num_workers=1)
    before = dict(vars(bare))
    assert list(train(ResumableLoader(bare), 1))
    assert vars(bare) == before
    assert "__getitems__" not in vars(bare.dataset)


def test_two_iterators_at_once_are_two_passes() -> None:
    running = loader(num_workers=1)
    old = iter(running)
    next(old)
    new = iter(running)
    next(new)
    assert plain(next(old))[0] == plain(next(new))[0] == [3, 4, 5]
    assert (running.epoch, running.batch_in_epoch) == (1, 2)


def appends(worker: int) -> None:
    get_worker_info().dataset.append(worker)  # type: ignore[union-attr]


def test_a_worker_init_fn_sees_a_list_as_with_a_bare_loader() -> None:
    assert plain(list(loader([1, 2, 3], num_workers=1, worker_init_fn=appends))) == [[1, 2, 3]]
