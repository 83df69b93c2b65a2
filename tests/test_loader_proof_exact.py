"""An exact job proves itself at a resume without a word, and what is fetched once more for it changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckptd import CheckpointWarning, ResumableLoader
from loader_trace import (
    EPOCH,
    Augmented,
    WithOwnGenerators,
    assert_exact,
    loader,
    position,
    resume,
    trace,
    train,
)

SAID = "most likely not those of the uninterrupted run"


class Pair(NamedTuple):
    index: Any
    value: Any


@dataclasses.dataclass
class Boxed:
    """A batch of a class of its own."""

    samples: list[Any]

    def pin_memory(self) -> Boxed:
        return self


class Closed:
    """A batch into which nobody can look."""

    __slots__ = ("__weakref__",)


def tree(samples: list[Any]) -> Any:
    index, *values = zip(*samples, strict=True)
    return {"y": torch.tensor(index), "x": Pair(index, [np.array(values), {"name": [str(i) for i in index]}])}


def flat(batch: Any) -> Any:
    if isinstance(batch, Boxed):
        return flat(batch.samples)
    if isinstance(batch, dict):
        return {key: flat(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [flat(item) for item in batch]
    return batch.tolist() if isinstance(batch, (torch.Tensor, np.ndarray)) else batch


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("collate", [tree, Boxed, list])
def test_an_exact_job_proves_itself_whatever_its_batches_are(
    collate: Callable[[list[Any]], Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader_trace.plain", flat)
    assert_exact(
        lambda: loader(WithOwnGenerators(), shuffle=True, collate_fn=collate, num_workers=workers), by="skip"
    )


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("batch", [None, 2])
def test_exact_workers_prove_themselves(batch: int | None, persistent: bool) -> None:
    def make() -> ResumableLoader:
        return loader(
            WithOwnGenerators(),
            batch,
            shuffle=True,
            num_workers=2,
            prefetch_factor=3,
            persistent_workers=persistent,
        )

    assert_exact(make, range(0, 23, 2), steps=23, ahead=9)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_position_right_after_a_resume_and_later_is_that_of_the_whole_run(workers: int) -> None:
    def make() -> ResumableLoader:
        return loader(WithOwnGenerators(), 2, shuffle=True, num_workers=workers)

    _, positions = trace(make, 12)
    for cut in (1, 2, 4, 5, 7):
        resumed = resume(make, positions[cut])
        batches = iter(resumed)
        assert resumed.state_dict() == positions[cut][0]
        del batches
        resumed = resume(make, positions[cut])
        later: list[Any] = []
        list(train(resumed, 3, lambda _, of=resumed, to=later: to.append(position(of))))  # type: ignore[misc]
        assert [state for state, _ in later] == [state for state, _ in positions[cut + 1 : cut + 4]]


FETCHED: list[int] = []


class Counting(Augmented):
    def __getitem__(self, index: int) -> Any:
        FETCHED.append(index)
        return super().__getitem__(index)


def test_one_batch_is_fetched_once_more() -> None:
    FETCHED.clear()
    _, positions = trace(lambda: loader(Counting()), 3)
    FETCHED.clear()
    iter(resume(lambda: loader(Counting()), positions[3]))
    assert FETCHED == [6, 7, 8]


def test_a_batch_that_cannot_be_read_is_not_fetched_once_more() -> None:
    def make() -> ResumableLoader:
        return loader(Counting(), collate_fn=lambda _: Closed())

    FETCHED.clear()
    _, positions = trace(make, 3)
    FETCHED.clear()
    iter(resume(make, positions[3]))
    assert FETCHED == []


def test_a_position_of_before_has_no_proof_and_is_taken() -> None:
    whole, positions = trace(loader, EPOCH)
    state, rng = positions[2]
    del state["pass"]["proofs"]
    assert list(train(resume(loader, (state, rng)), 2)) == whole[2:4]


def test_other_workers_prove_nothing() -> None:
    _, positions = trace(loader, 3)
    with pytest.warns(CheckpointWarning, match="num_workers is 1, 0 in the checkpoint") as said:
        iter(resume(lambda: loader(num_workers=1), positions[2]))
    assert len(said) == 1


def test_a_dataset_with_a_state_dict_is_not_asked_for_it_before_each_batch() -> None:
    class Asked(Augmented):
        asked = 0

        def __init__(self) -> None:
            self.noise = np.zeros(500)

        def __getitem__(self, index: int) -> Any:
            self.noise[0] += 1
            return index, self.noise[0]

        def state_dict(self) -> dict[str, Any]:
            type(self).asked += 1
            return {"noise": float(self.noise[0])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.noise[0] = state["noise"]

    running = loader(Asked())
    batches = iter(running)
    before = Asked.asked
    for _ in batches:
        pass
    assert Asked.asked == before
    assert_exact(lambda: loader(Asked()), range(1, EPOCH), steps=EPOCH, by="skip")
