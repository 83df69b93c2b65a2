"""persistent_workers=True: the workers' generators go on over epochs, in a resumed run too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckptd import ResumableLoader, restore_rng_state
from ckptd.errors import CheckpointWarning
from loader_samplers import Eager, Shuffling
from loader_trace import (
    BATCH,
    EPOCH,
    SAMPLES,
    Remembering,
    Seeded,
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

pytestmark = pytest.mark.slow


def persistent(data: Any = None, workers: int = 2, **options: Any) -> ResumableLoader:
    data = WithOwnGenerators() if data is None else data
    return loader(data, num_workers=workers, persistent_workers=True, **options)


class EagerBatches:
    """A batch sampler that draws the order when its iterator is made, before torch seeds the workers."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[at : at + BATCH] for at in range(0, SAMPLES, BATCH)])

    def __len__(self) -> int:
        return EPOCH


KINDS: dict[str, Callable[[], ResumableLoader]] = {
    "shuffled": lambda: persistent(Seeded(), shuffle=True),
    "own generator, prefetch 1": lambda: persistent(
        shuffle=True, prefetch_factor=1, generator=torch.Generator().manual_seed(3), drop_last=True
    ),
    "eager sampler": lambda: persistent(sampler=Eager(), workers=1),
    "eager batch sampler": lambda: persistent(Seeded(), batch=1, batch_sampler=EagerBatches()),
    "sampler with a state_dict": lambda: persistent(sampler=Shuffling()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_any_epoch(kind: str) -> None:
    """Cuts: none yet, first batch, the epoch's last but one and last, its edge, in the next two."""
    assert_exact(KINDS[kind], (0, 1, 3, 4, 5, 9, 11), ahead=2, by="skip")


def test_a_run_cut_between_two_epochs_goes_on() -> None:
    make = KINDS["shuffled"]
    seed()
    running = make()
    for _ in range(2):
        for _ in running:
            draws()
    cut = position(running)
    assert (running.epoch, running.batch_in_epoch, cut[0]["pass"]) == (2, 0, None)
    whole = list(train(running, 6))
    assert list(train(resume(make, cut), 6)) == whole


def test_an_epoch_begun_after_one_was_left_by_break_goes_on() -> None:
    """What the workers had fetched ahead is thrown away, and moved their generators."""
    make = KINDS["shuffled"]
    seed()
    running = make()
    for _ in running:
        draws()
        break
    batches = iter(running)
    cuts = [position(running)]
    whole = []
    for batch in batches:
        whole.append((plain(batch), draws()))
        cuts.append(position(running))
    for done in (0, 1, 2):
        assert list(train(resume(make, cuts[done]), 2)) == whole[done : done + 2]


def test_a_run_cut_again_and_again_goes_on() -> None:
    make = KINDS["shuffled"]
    whole, positions = trace(make, 11)
    seen, cut = [], positions[2]
    for steps in (1, 1, 2, 4, 1):
        resumed = resume(make, cut)
        seen += train(resumed, steps)
        cut = position(resumed)
    assert seen == whole[2:11]


def test_a_position_restored_into_running_workers_is_taken_over() -> None:
    make = KINDS["shuffled"]
    whole, positions = trace(make, 7)
    running = make()
    list(train(running, EPOCH + 1))
    seed(0)
    running.load_state_dict(positions[5][0])
    restore_rng_state(positions[5][1])
    assert list(train(running, 2)) == whole[5:7]


def test_a_run_cut_between_two_epochs_restored_in_place_goes_on() -> None:
    make = KINDS["shuffled"]
    seed()
    running = make()
    for _ in running:
        draws()
    cut = position(running)
    whole = list(train(running, 2))
    running.load_state_dict(cut[0])
    restore_rng_state(cut[1])
    assert list(train(running, 2)) == whole


def test_the_workers_are_kept_over_epochs_and_give_what_a_bare_loaders_do() -> None:
    def bare() -> DataLoader[Any]:
        return DataLoader(WithOwnGenerators(), 3, shuffle=True, num_workers=2, persistent_workers=True)

    seed()
    running = bare()
    wanted = [(plain(batch), draws()) for _ in range(3) for batch in running]
    seed()
    assert list(train(ResumableLoader(bare()), 12)) == wanted


def test_an_older_iterator_goes_on_with_the_newest_pass_as_torchs_does() -> None:
    running = persistent(workers=1)
    old = iter(running)
    next(old)
    new = iter(running)
    first = plain(next(old))[0]
    assert (first, running.batch_in_epoch, plain(next(new))[0]) == ([0, 1, 2], 1, [3, 4, 5])


def one(workers: int, persistent: bool = False) -> ResumableLoader:
    return loader(num_workers=workers, persistent_workers=persistent)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((1, True), (2, True), "num_workers is 2, 1 in"),
        ((0, False), (1, False), "num_workers is 1, 0 in"),
        ((1, False), (0, False), "num_workers is 0, 1 in"),
        ((1, True), (1, False), "persistent_workers is False, True in"),
        ((1, False), (1, True), "persistent_workers is True, False in"),
    ],
)
def test_other_workers_between_two_epochs_are_said(before: Any, after: Any, said: str) -> None:
    running = one(*before)
    list(running)
    with pytest.warns(
        CheckpointWarning, match=f"{said} the checkpoint: the epochs to come have other random"
    ):
        resume(lambda: one(*after), position(running))


def test_other_workers_before_the_first_batch_are_said_too() -> None:
    """In this process the samples draw from its generators, in a worker from the worker's."""
    with pytest.warns(CheckpointWarning, match="num_workers is 1, 0 in the checkpoint: the epochs to come"):
        resume(lambda: one(1, True), position(one(0)))


def test_a_dataset_that_reaches_back_into_an_earlier_epoch_is_said() -> None:
    def make() -> ResumableLoader:
        return persistent(Remembering(), workers=1)

    _, positions = trace(make, 6)
    with pytest.warns(CheckpointWarning, match="earlier epochs"):
        iter(resume(make, positions[6]))


class Late(WithOwnGenerators):
    """Keeps what isn't recorded only from its fourth sample on: skipped to before that, fetched again after."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kept = 0, [0.0]

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        noise = super().__getitem__(index)
        if self.calls > 3:
            self.kept.append(noise[1])
        return (*noise, sum(self.kept))


def test_a_run_skipped_to_a_position_and_then_fetched_again_in_one_epoch_goes_on() -> None:
    """What the workers remembered at the epoch's start isn't what they remember where the first resume begins."""

    def make() -> ResumableLoader:
        return persistent(Late(), batch=1)

    whole, positions = trace(make, 11)
    first = resume(make, positions[3])
    assert list(train(first, 6)) == whole[3:9]
    again = resume(make, position(first))
    assert list(train(again, 2)) == whole[9:11]
    assert (first.resumed_by[:4], again.resumed_by[:7]) == ("skip", "refetch")
