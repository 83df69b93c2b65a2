"""In the middle of an epoch another length is refused, also where the number of batches is the same."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, RandomSampler

from ckptd import ResumableLoader
from ckptd.errors import StateMismatch
from loader_trace import position, resume


class Growing(Dataset[int]):
    """A replay buffer: it gives and takes what was put into it."""

    def __init__(self, length: int = 4) -> None:
        self.items = list(range(length))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]

    def state_dict(self) -> dict[str, Any]:
        return {"items": list(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items[:] = state["items"]


def over(length: int, **options: Any) -> ResumableLoader:
    return ResumableLoader(DataLoader(range(length), 2, **options))


def begun(loader: ResumableLoader) -> Any:
    next(iter(loader))
    return position(loader)


@pytest.mark.parametrize(("before", "after"), [(12, 11), (11, 12)])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}])
def test_another_length_with_the_same_number_of_batches_is_refused_in_mid_epoch(
    before: int, after: int, options: dict[str, Any]
) -> None:
    with pytest.raises(StateMismatch, match=f"another length of the dataset.*{after}.*{before}"):
        resume(lambda: over(after, **options), begun(over(before, **options)))


@pytest.mark.parametrize("kind", [list, RandomSampler])
def test_a_sampler_of_another_length_is_refused_in_mid_epoch(kind: Any) -> None:
    def make(length: int) -> ResumableLoader:
        return over(20, sampler=kind(range(length)))

    with pytest.raises(StateMismatch, match="another length of the sampler"):
        resume(lambda: make(12), begun(make(11)))


def test_another_length_between_two_epochs_is_taken() -> None:
    assert len(list(resume(lambda: over(11), position(over(12))))) == 6


def replaying(data: Growing) -> ResumableLoader:
    return ResumableLoader(DataLoader(data, 2, sampler=RandomSampler(data, replacement=True, num_samples=8)))


def test_a_dataset_that_grows_as_it_is_restored_is_taken() -> None:
    running = replaying(Growing())
    running.dataset.items += [4, 5, 6]
    batches = iter(running)
    next(batches)
    at = position(running)
    whole = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in resume(lambda: replaying(Growing()), at)] == whole


def test_a_dataset_that_is_given_as_it_had_grown_is_taken() -> None:
    running = replaying(Growing())
    running.dataset.items += [4, 5, 6]
    resume(lambda: replaying(Growing(7)), begun(running))


def test_a_position_of_before_that_has_no_sizes_is_taken() -> None:
    at, draws = begun(over(12))
    del at["kind"]["sizes"]
    assert len(list(resume(lambda: over(11), (at, draws)))) == 5


@pytest.mark.parametrize("sizes", [None, 3, [], [[1, 2]], [[1, 2], [3]], [[1, 2], 3], {}, [[1, 2], [3, "4"]]])
def test_damaged_sizes_are_refused(sizes: Any) -> None:
    at, draws = begun(over(12))
    at["kind"]["sizes"] = sizes
    with pytest.raises(StateMismatch, match="damaged"):
        resume(lambda: over(12), (at, draws))


class Unready(Dataset[int]):
    """It knows its length once it is opened, which happens at the first fetch."""

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: int) -> int:
        self.file = range(6)
        return self.file[index]


def test_a_dataset_that_does_not_know_its_length_yet_is_taken() -> None:
    def make() -> ResumableLoader:
        return ResumableLoader(DataLoader(Unready(), 2, sampler=range(6)))

    assert [batch.tolist() for batch in resume(make, begun(make()))] == [[2, 3], [4, 5]]
