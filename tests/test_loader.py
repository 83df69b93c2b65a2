"""Field cases 21 and 22 at the loader: the same samples, augmentations and next draws after every cut."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from ckptd import ResumableLoader, capture_rng_state, restore_rng_state
from ckptd.errors import CheckpointWarning, InvalidArgument, StateMismatch

SAMPLES = 11
BATCH = 3  # 4 batches an epoch, the last one short


class Augmented(Dataset[Any]):
    """Every item draws from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


class WithOwnGenerators(Augmented):
    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(2), torch.Generator()
        self.legacy = np.random.RandomState(3)
        self.philox = np.random.Generator(np.random.Philox(4))

    def __getitem__(self, index: int) -> Any:
        own = (self.python.random(), self.numpy.random(), float(torch.rand((), generator=self.torch)))
        return (*super().__getitem__(index), *own, self.legacy.random(), self.philox.random())


Make = Callable[[], ResumableLoader]


def plain(workers: int = 0, prefetch: int | None = None, **options: Any) -> ResumableLoader:
    options = {"shuffle": True, **options}
    return ResumableLoader(
        DataLoader(Augmented(), BATCH, num_workers=workers, prefetch_factor=prefetch, **options)
    )


def with_generator(workers: int = 0, prefetch: int | None = None) -> ResumableLoader:
    return plain(workers, prefetch, generator=torch.Generator().manual_seed(99))


def with_replacement() -> ResumableLoader:
    data, generator = Augmented(), torch.Generator().manual_seed(5)
    return ResumableLoader(DataLoader(data, BATCH, sampler=RandomSampler(data, True, 11, generator)))


def with_own_generators(workers: int = 0) -> ResumableLoader:
    data = Subset(WithOwnGenerators(), range(SAMPLES))
    return ResumableLoader(DataLoader(data, BATCH, shuffle=True, num_workers=workers))


def unshuffled() -> ResumableLoader:
    return plain(shuffle=False)


def seed() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def draws() -> tuple[float, float, float]:
    """One draw of each global generator, as a training step makes with dropout or label noise."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def train(loader: ResumableLoader, steps: int, *, cut: Callable[[int], None] | None = None) -> Iterator[Any]:
    """`steps` steps over as many epochs as it takes; cut(step) is called where a snapshot would be made."""
    done = 0
    while done < steps:
        for batch in loader:
            yield [column.tolist() for column in batch], draws()
            done += 1
            if cut is not None:
                cut(done)
            if done == steps:
                return


def trace(make: Make, steps: int) -> tuple[list[Any], dict[int, Any]]:
    """The uninterrupted run, and a snapshot after each of its steps."""
    seed()
    loader, snapshots = make(), {}

    def cut(step: int) -> None:
        snapshots[step] = copy.deepcopy((loader.state_dict(), capture_rng_state()))

    snapshots[0] = copy.deepcopy((loader.state_dict(), capture_rng_state()))
    return list(train(loader, steps, cut=cut)), snapshots


def resume(make: Make, snapshot: Any) -> ResumableLoader:
    """A new process as far as the loader can tell: other seeds, a new loader, restored, RNG last."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    loader = make()
    position, rng = copy.deepcopy(snapshot)
    loader.load_state_dict(position)
    restore_rng_state(rng)
    return loader


KINDS = {
    "workers 0": plain,
    "own generator": with_generator,
    "replacement": with_replacement,
    "generators of the dataset": with_own_generators,
    "unshuffled": unshuffled,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(20))
def test_a_run_cut_at_any_step_sees_the_same_batches_and_draws(kind: str, at: int) -> None:
    whole, snapshots = trace(KINDS[kind], 20)
    assert list(train(resume(KINDS[kind], snapshots[at]), 20 - at)) == whole[at:]


WITH_WORKERS = {
    "workers 2": lambda: plain(2),
    "workers 2, prefetch 4": lambda: plain(2, 4),
    "workers 2, prefetch 4, own generator": lambda: with_generator(2, 4),
    "workers 2, generators of the dataset": lambda: with_own_generators(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_a_run_with_workers_cut_in_any_place_of_any_epoch_sees_the_same(kind: str) -> None:
    make = WITH_WORKERS[kind]
    whole, snapshots = trace(make, 18)
    for at in (0, 1, 3, 4, 5, 13, 14, 16):  # first, epoch's last and its edge, epoch 3
        assert list(train(resume(make, snapshots[at]), 18 - at)) == whole[at:], f"cut at {at}"


@pytest.mark.parametrize("kind", ["workers 0", "own generator"])
def test_a_run_cut_twice_in_one_epoch_sees_the_same(kind: str) -> None:
    make = KINDS[kind]
    whole, snapshots = trace(make, 20)
    loader = resume(make, snapshots[13])
    second: list[Any] = []
    seen = list(train(loader, 1, cut=lambda _: second.append((loader.state_dict(), capture_rng_state()))))
    seen += list(train(resume(make, second[0]), 6))
    assert seen == whole[13:]


@pytest.mark.parametrize("kind", [*KINDS, "workers 2, prefetch 4"])
def test_a_run_cut_between_two_epochs_sees_the_same(kind: str) -> None:
    make = (KINDS | WITH_WORKERS)[kind]
    seed()
    loader = make()
    for _ in range(3):
        for _ in loader:
            draws()
    snapshot = copy.deepcopy((loader.state_dict(), capture_rng_state()))
    assert (loader.epoch, loader.batch_in_epoch) == (3, 0)
    whole = list(train(loader, 6))
    assert list(train(resume(make, snapshot), 6)) == whole


def test_a_cut_between_the_iterator_and_its_first_batch_sees_the_same() -> None:
    seed()
    loader = plain()
    batches = iter(loader)
    draws()
    snapshot = copy.deepcopy((loader.state_dict(), capture_rng_state()))
    whole = [[column.tolist() for column in batch] for batch in batches]
    resumed = [[column.tolist() for column in batch] for batch in resume(plain, snapshot)]
    assert resumed == whole


def test_draws_between_the_iterator_and_its_first_batch_do_not_shift_a_later_cut() -> None:
    seed()
    loader = plain()
    batches = iter(loader)
    draws()
    next(batches)
    snapshot = copy.deepcopy((loader.state_dict(), capture_rng_state()))
    whole = [batch[0].tolist() for batch in batches]
    assert [batch[0].tolist() for batch in resume(plain, snapshot)] == whole


def test_a_snapshot_between_restore_and_the_first_iterator_is_the_restored_position() -> None:
    whole, snapshots = trace(plain, 10)
    loader = resume(plain, snapshots[6])
    again = copy.deepcopy((loader.state_dict(), capture_rng_state()))
    assert list(train(resume(plain, again), 4)) == whole[6:]


def test_wrapping_a_loader_changes_nothing_in_what_it_gives() -> None:
    seed()
    bare = DataLoader(Augmented(), BATCH, shuffle=True)
    wanted = [([column.tolist() for column in batch], draws()) for _ in range(2) for batch in bare]
    seed()
    assert list(train(plain(), 8)) == wanted


def test_taking_the_position_draws_from_no_generator() -> None:
    seed()
    loader = with_own_generators()
    batches = iter(loader)
    next(batches)
    before = loader.state_dict(), capture_rng_state()
    assert repr(before) == repr((loader.state_dict(), capture_rng_state()))


def test_a_loop_left_by_break_is_paused_for_a_resume_and_over_for_this_process() -> None:
    seed()
    loader = plain()
    for _ in loader:
        break
    snapshot = copy.deepcopy((loader.state_dict(), capture_rng_state()))
    assert len(list(resume(plain, snapshot))) == 3
    assert len(list(loader)) == 4
    assert loader.epoch == 2


def test_an_iterator_that_was_replaced_moves_the_position_no_longer() -> None:
    loader = plain()
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    list(old)
    assert (loader.epoch, loader.batch_in_epoch) == (1, 1)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


def test_an_iterable_dataset_goes_on_too() -> None:
    loader = ResumableLoader(DataLoader(Counting(), BATCH))
    next(iter(loader))
    other = ResumableLoader(DataLoader(Counting(), BATCH))
    other.load_state_dict(loader.state_dict())
    assert torch.cat(list(other)).tolist() == list(range(BATCH, SAMPLES))


def test_the_loader_behind_is_reachable() -> None:
    loader = plain()
    assert len(loader) == 4
    assert len(loader.dataset) == SAMPLES
    with pytest.raises(AttributeError):
        _ = loader.nothing_of_the_kind
    assert copy.copy(loader).epoch == 0


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"in_order": False}])
def test_a_loader_that_cannot_be_resumed_exactly_is_refused(options: dict[str, bool]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        ResumableLoader(DataLoader(Augmented(), BATCH, num_workers=1, **options))


def test_something_that_is_no_data_loader_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        ResumableLoader([1, 2, 3])  # type: ignore[arg-type]


def in_mid_epoch() -> dict[str, Any]:
    loader = plain()
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize(
    "change", [{"batch_size": 4}, {"length": 5}, {"generators": {"x": b""}}, {"more": 1}]
)
def test_a_position_of_another_loader_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    loader = plain()
    with pytest.raises(StateMismatch):
        loader.load_state_dict(in_mid_epoch() | change)
    assert len(list(loader)) == 4


def test_a_position_beyond_the_end_of_the_loader_is_refused() -> None:
    loader = plain()
    loader.load_state_dict(in_mid_epoch() | {"batches": 5})
    rng = repr(capture_rng_state())
    with pytest.raises(StateMismatch, match="ends before"):
        iter(loader)
    assert repr(capture_rng_state()) == rng


def test_another_number_of_workers_is_said() -> None:
    with pytest.warns(CheckpointWarning, match="num_workers"):
        plain(2).load_state_dict(in_mid_epoch())
