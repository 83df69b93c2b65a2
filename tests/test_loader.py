"""Field cases 21 and 22 at the loader: the same samples, augmentations and next draws after every cut."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from ckptd import ResumableLoader
from loader_trace import (
    EPOCH,
    SAMPLES,
    Augmented,
    Jitter,
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


class Jittering(Augmented):
    def __init__(self, transform: Callable[[float], float]) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return index, self.transform(index)


def closure() -> Callable[[float], float]:
    rng = random.Random(8)
    return lambda value: value + rng.random()


def shift(value: float, rng: np.random.Generator) -> float:
    return value + rng.random()


class Slotted:
    __slots__ = ("calls", "rng")

    def __init__(self) -> None:
        self.rng, self.calls = random.Random(9), 0

    def __call__(self, value: float) -> float:
        self.calls += 1
        return value + self.rng.random() + self.calls


class Counted(Augmented):
    """Has a state_dict, a counter and something only the state_dict has."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, [0]

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        self.seen = [*self.seen[-1:], index]
        return index, self.calls, sum(self.seen), random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class NoisyCollate:
    def __init__(self) -> None:
        self.rng, self.calls = torch.Generator(), 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        return default_collate(samples), self.calls, float(torch.rand((), generator=self.rng))


class CountingFromNone(Augmented):
    def __init__(self) -> None:
        self.calls: int | None = None

    def __getitem__(self, index: int) -> Any:
        self.calls = (self.calls or 0) + 1
        return index, self.calls


def with_generator() -> ResumableLoader:
    return loader(shuffle=True, generator=torch.Generator().manual_seed(99))


KINDS: dict[str, Callable[[], ResumableLoader]] = {
    "shuffled": lambda: loader(shuffle=True),
    "unshuffled": loader,
    "drop_last": lambda: loader(shuffle=True, drop_last=True),
    "own generator": with_generator,
    "no batches": lambda: loader(batch=None, shuffle=True),
    "a list": lambda: loader(list(range(SAMPLES)), shuffle=True),
    "generators of the dataset": lambda: loader(WithOwnGenerators(), shuffle=True),
    "counter that was None": lambda: loader(CountingFromNone(), shuffle=True),
    "of a subset's": lambda: loader(Subset(WithOwnGenerators(), range(SAMPLES)), shuffle=True),
    "of a transform": lambda: loader(Jittering(Jitter()), shuffle=True),
    "of a closure": lambda: loader(Jittering(closure())),
    "of a partial": lambda: loader(Jittering(functools.partial(shift, rng=np.random.default_rng(1)))),
    "of a bound method": lambda: loader(Jittering(Jitter().__call__)),
    "of an object with slots": lambda: loader(Jittering(Slotted())),
    "of the collate_fn": lambda: loader(collate_fn=NoisyCollate(), shuffle=True),
    "dataset with a state_dict": lambda: loader(Counted(), shuffle=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_cut_at_any_step_sees_the_same_batches_and_draws(kind: str) -> None:
    assert_exact(KINDS[kind], steps=20, by="skip")


def test_a_run_cut_twice_in_one_epoch_sees_the_same() -> None:
    make = KINDS["generators of the dataset"]
    whole, positions = trace(make, 20)
    first = resume(make, positions[13])
    seen = list(train(first, 1))
    seen += list(train(resume(make, position(first)), 6))
    assert seen == whole[13:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_cut_between_two_epochs_sees_the_same(kind: str) -> None:
    seed()
    running = KINDS[kind]()
    for _ in range(3):
        for _ in running:
            draws()
    cut = position(running)
    assert (running.epoch, running.batch_in_epoch) == (3, 0)
    whole = list(train(running, 6))
    assert list(train(resume(KINDS[kind], cut), 6)) == whole


def test_a_cut_between_the_iterator_and_its_first_batch_sees_the_same() -> None:
    seed()
    running = loader(shuffle=True)
    batches = iter(running)
    draws()
    cut = position(running)
    whole = [plain(batch) for batch in batches]
    assert [plain(batch) for batch in resume(KINDS["shuffled"], cut)] == whole


def test_draws_between_the_iterator_and_its_first_batch_do_not_shift_a_later_cut() -> None:
    seed()
    running = loader(shuffle=True)
    batches = iter(running)
    draws()
    next(batches)
    cut = position(running)
    whole = [plain(batch) for batch in batches]
    assert [plain(batch) for batch in resume(KINDS["shuffled"], cut)] == whole


def test_a_snapshot_between_restore_and_the_first_iterator_is_the_restored_position() -> None:
    make = KINDS["generators of the dataset"]
    whole, positions = trace(make, 10)
    again = position(resume(make, positions[6]))
    assert list(train(resume(make, again), 4)) == whole[6:]


def test_a_position_inside_gradient_accumulation_goes_on_with_the_next_micro_batch() -> None:
    """Two micro-batches make a step; the gradients between are the model's, the position is the loader's."""

    def gradients(of: ResumableLoader, micro_batches: int, weight: torch.Tensor) -> list[Any]:
        seen = []
        for count, batch in enumerate(of, 1):
            (weight * batch[3].sum()).backward()
            seen.append((plain(batch), weight.grad.item(), draws()))  # type: ignore[union-attr]
            if count == micro_batches:
                break
        return seen

    seed()
    running, weight = loader(shuffle=True), torch.ones((), requires_grad=True)
    gradients(running, 1, weight)
    cut, grad = position(running), weight.grad.clone()  # type: ignore[union-attr]
    seed()
    whole = gradients(loader(shuffle=True), 4, torch.ones((), requires_grad=True))
    resumed, weight = resume(KINDS["shuffled"], cut), torch.ones((), requires_grad=True)
    weight.grad = grad
    assert gradients(resumed, 4, weight) == whole[1:]


def test_wrapping_a_loader_changes_nothing_in_what_it_gives() -> None:
    seed()
    bare = DataLoader(WithOwnGenerators(), 3, shuffle=True)
    wanted = [(plain(batch), draws()) for _ in range(2) for batch in bare]
    seed()
    assert list(train(loader(WithOwnGenerators(), shuffle=True), 2 * EPOCH)) == wanted


def test_taking_the_position_draws_from_no_generator() -> None:
    seed()
    running = loader(WithOwnGenerators(), generator=torch.Generator())
    next(iter(running))
    before = position(running)
    assert repr(before) == repr(position(running))


def test_a_loop_left_by_break_is_paused_for_a_resume_and_over_for_this_process() -> None:
    seed()
    running = loader(shuffle=True)
    for _ in running:
        break
    cut = position(running)
    assert len(list(resume(KINDS["shuffled"], cut))) == 3
    assert len(list(running)) == EPOCH
    assert running.epoch == 2


@pytest.mark.parametrize(
    "inner", [list, lambda running: next(iter(running))], ids=["a whole pass", "a batch"]
)
def test_a_look_at_the_data_inside_the_loop_leaves_its_position_to_the_loop(
    inner: Callable[[Any], Any],
) -> None:
    seed()
    running, whole, cuts = loader(shuffle=True), [], []
    for number, batch in enumerate(running):
        whole.append(plain(batch))
        if number == 1:
            inner(running)
        cuts.append(position(running))
    assert (running.epoch, running.batch_in_epoch) == (1, 0)
    assert list(running) and running.epoch == 2
    assert [(cut[0]["epoch"], cut[0]["pass"]["batches"]) for cut in cuts[2:]] == [(0, 3), (0, 4)]
    assert [plain(batch)[0] for batch in resume(KINDS["shuffled"], cuts[2])] == [whole[3][0]]


def test_an_iterator_that_is_over_is_over_once() -> None:
    running = loader()
    batches = iter(running)
    list(batches)
    assert list(batches) == []
    assert (running.epoch, running.batch_in_epoch) == (1, 0)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy],
    ids=["deep", "shallow"],
)
def test_a_loader_in_mid_epoch_can_be_copied(copied: Callable[[Any], Any]) -> None:
    running = loader(WithOwnGenerators(), shuffle=True)
    next(iter(running))
    other = copied(running)
    assert (other.epoch, other.batch_in_epoch) == (1, 0)
    assert [len(list(other)), other.epoch] == [EPOCH, 2]
    assert other.state_dict()["now"]["values"].keys() == running.state_dict()["now"]["values"].keys() != set()


def test_the_loader_behind_is_reachable() -> None:
    running = loader()
    assert len(running) == EPOCH
    assert len(running.dataset) == SAMPLES
    with pytest.raises(AttributeError):
        _ = running.nothing_of_the_kind
    assert copy.copy(running).epoch == 0


def test_an_attribute_that_a_resumed_script_gives_anew_is_left_alone() -> None:
    """A path, an option: only what changed since the loader was wrapped is put back."""

    class At(Augmented):
        def __init__(self, path: str) -> None:
            self.path, self.reads = path, 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return index

    _, positions = trace(lambda: loader(At("/old")), 2)
    resumed = resume(lambda: loader(At("/new")), positions[2])
    next(iter(resumed))
    assert (resumed.dataset.path, resumed.dataset.reads) == ("/new", 9)
