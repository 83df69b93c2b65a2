"""A resume proves itself: what it fetches once more must be what it was, and a difference is said."""

from __future__ import annotations

import array
import collections
import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ckptd import CheckpointWarning, ResumableLoader
from loader_trace import (
    EPOCH,
    SAMPLES,
    Augmented,
    Jitter,
    Remembering,
    loader,
    plain,
    position,
    resume,
    trace,
    train,
)

SAID = "most likely not those of the uninterrupted run"


class Unseen(Dataset[Any]):
    """Each sample depends on how often `draw` was called, which is kept where nobody looks."""

    def __init__(self, draw: Callable[[int], Any], **more: Any) -> None:
        self.draw = draw
        vars(self).update(more)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, self.draw(index)


class InPlace(Unseen):
    """Changes something of its own in place."""

    def __init__(self, held: Any, change: Callable[[Any, int], Any]) -> None:
        super().__init__(lambda index: change(self.held, index))
        self.held = held


class Late(Unseen):
    """Makes its transform at the first sample."""

    def __init__(self) -> None:
        self.transform: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.transform is None:
            self.transform = Jitter()
        return index, self.transform(index)


def _counted(held: Any, index: int) -> float:
    held[index] += 1
    return float(sum(held))


def _viewed(held: torch.Tensor, index: int) -> float:
    held.numpy()[0] += index
    return float(held[0])


def _pushed(held: Any, index: int) -> int:
    held.append(index)
    return int(sum(held))


UNSEEN: dict[str, Callable[[Callable[[], TextIO]], Dataset[Any]]] = {
    "an iterator": lambda _: InPlace(itertools.count(), lambda held, _: next(held)),
    "a large array": lambda _: InPlace(np.zeros(500), _counted),
    "a large list": lambda _: InPlace([0] * 100, _counted),
    "a full deque": lambda _: InPlace(collections.deque([0] * 100, maxlen=100), _pushed),
    "a tensor through NumPy": lambda _: InPlace(torch.zeros(3), _viewed),
    "an array.array": lambda _: InPlace(array.array("d", [0.0] * SAMPLES), _counted),
    "a file": lambda opened: InPlace(opened(), lambda held, _: held.readline()),
    "made late": lambda _: Late(),
}
GENERATORS: dict[str, Callable[[], Dataset[Any]]] = {
    "a method": lambda: Unseen(random.Random(5).triangular),
    "a default": lambda: Unseen(lambda index, rng=random.Random(4): index + rng.random()),  # type: ignore[misc]  # noqa: B008
    "in a deque": lambda: InPlace(collections.deque([random.Random(1)]), lambda held, _: held[0].random()),
    "bits": lambda: InPlace(np.random.PCG64(1), lambda held, _: np.random.Generator(held).random()),
    "spawned": lambda: InPlace(
        np.random.SeedSequence(1), lambda held, _: np.random.default_rng(held.spawn(1)[0]).random()
    ),
    "one per sample": lambda: InPlace(
        [random.Random(k) for k in range(5000)], lambda held, _: held[0].random()
    ),
}


def cut_everywhere(make: Callable[[], ResumableLoader], epoch: int = EPOCH) -> list[tuple[bool, bool]]:
    """For each cut inside an epoch: whether what followed was otherwise, and whether that was said."""
    steps = 2 * epoch
    whole, positions = trace(make, steps)
    found = []
    for cut in (cut for cut in range(steps) if cut % epoch):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = list(train(resume(make, positions[cut]), steps - cut))
        said = [str(one.message) for one in caught if one.category is CheckpointWarning]
        assert sum(SAID in one for one in said) <= 1, said
        found.append((rest != whole[cut:], bool(said)))
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], TextIO]]:
    """Opens a file of many lines."""
    path = tmp_path / "lines"
    path.write_text("".join(f"{line}\n" for line in range(4 * SAMPLES)))
    with contextlib.ExitStack() as files:
        yield lambda: files.enter_context(path.open())


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_nobody_can_see_changing_is_told_by_what_it_makes(
    kind: str, opened: Callable[[], TextIO]
) -> None:
    found = cut_everywhere(lambda: loader(UNSEEN[kind](opened)))
    assert all(said or not differs for differs, said in found), found
    assert any(differs for differs, _ in found)


@pytest.mark.filterwarnings("ignore:dataset and samplers hold over:ckptd.CheckpointWarning")
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_is_not_found_is_told_by_what_it_makes(kind: str) -> None:
    found = cut_everywhere(lambda: loader(GENERATORS[kind]()))
    assert all(said or not differs for differs, said in found), found


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["an iterator", "a large array", "made late"])
def test_each_worker_proves_itself(kind: str, persistent: bool, opened: Callable[[], TextIO]) -> None:
    def make() -> ResumableLoader:
        return loader(UNSEEN[kind](opened), 1, num_workers=2, persistent_workers=persistent)

    found = cut_everywhere(make, SAMPLES)
    assert all(said or not differs for differs, said in found), found
    assert any(differs for differs, _ in found)


class Straying(Unseen):
    """How often it draws is decided where nobody looks."""

    def __getitem__(self, index: int) -> Any:
        return index, [random.random() for _ in range(self.draw(index))]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_fetched_once_more_leaves_the_memory_of_the_position_even_if_it_is_other_data(
    workers: int,
) -> None:
    def make() -> ResumableLoader:
        numbers = itertools.count(1)
        return loader(Straying(lambda _: next(numbers)), 1, num_workers=workers)

    _, positions = trace(make, 6)
    resumed = resume(make, positions[6])
    with pytest.warns(CheckpointWarning, match=SAID):
        batches = iter(resumed)
    assert resumed.state_dict() == positions[6][0]
    del batches


class Failing(Augmented):
    """Its third batch fails in a resumed run."""

    failing = False

    def __getitem__(self, index: int) -> Any:
        if self.failing and index == 7:
            raise OSError("gone")
        return super().__getitem__(index)


def test_a_batch_that_fails_the_second_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> ResumableLoader:
        return loader(Failing())

    whole, positions = trace(make, EPOCH)
    monkeypatch.setattr(Failing, "failing", True)
    with pytest.warns(CheckpointWarning, match=SAID):
        assert list(train(resume(make, positions[3]), 1)) == whole[3:]


def test_a_batch_that_failed_proves_nothing() -> None:
    class Broken(Failing):
        failing = True

    running = loader(Broken())
    batches = iter(running)
    next(batches), next(batches)
    with pytest.raises(OSError, match="gone"):
        next(batches)
    state = position(running)
    rest = [plain(batch) for batch in batches]
    assert [plain(batch) for batch in resume(lambda: loader(Broken()), state)] == rest


def test_samples_that_are_never_the_same_are_said() -> None:
    def make() -> ResumableLoader:
        clock = itertools.count(random.SystemRandom().getrandbits(60))
        return loader(Unseen(lambda _: next(clock)))

    _, positions = trace(make, 3)
    with pytest.warns(CheckpointWarning, match=SAID):
        iter(resume(make, positions[2]))


def test_fetching_again_compares_what_it_fetches() -> None:
    class Both(Remembering):
        def __init__(self) -> None:
            super().__init__()
            self.count = itertools.count(random.SystemRandom().getrandbits(60))

        def __getitem__(self, index: int) -> Any:
            self.previous = [index]
            return index, next(self.count)

    running = loader(Both())
    batches = iter(running)
    next(batches), next(batches)
    resumed = loader(Both())
    resumed.load_state_dict(running.state_dict())
    with pytest.warns(CheckpointWarning, match=SAID):
        iter(resumed)
    assert resumed.resumed_by.startswith("refetch: ")
