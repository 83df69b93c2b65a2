"""A training loop over a loader, its uninterrupted run with a position after each step, and resumed runs of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ckptd import ResumableLoader, capture_rng_state, restore_rng_state

SAMPLES = 11
BATCH = 3  # 4 batches an epoch, the last one short
EPOCH = 4
STEPS = 3 * EPOCH

Make = Callable[[], ResumableLoader]


class Augmented(Dataset[Any]):
    """Every item draws from all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


class Jitter:
    """A transform with a generator of its own and a counter."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.calls = 0

    def __call__(self, value: float) -> float:
        self.calls += 1
        return value + self.rng.random() + self.calls


class WithOwnGenerators(Augmented):
    """Also from generators of its own, and from those of its transforms."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(2), torch.Generator()
        self.legacy = np.random.RandomState(3)
        self.philox = np.random.Generator(np.random.Philox(4))
        self.transforms = [Jitter(), Jitter()]

    def __getitem__(self, index: int) -> Any:
        own = (self.python.random(), self.numpy.random(), float(torch.rand((), generator=self.torch)))
        moved = [transform(index) for transform in self.transforms]
        return (*super().__getitem__(index), *own, self.legacy.random(), self.philox.random(), *moved)


class Remembering(Augmented):
    """Mixes a sample with the noise of the one before: an attribute that is no generator and no number."""

    def __init__(self) -> None:
        self.previous: Any = None

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(2)
        mixed, self.previous = noise + (0 if self.previous is None else self.previous), noise
        return index, mixed


class Seeded(WithOwnGenerators):
    """In a worker: draws from the worker's seed and number as well."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        own = 0.0 if info is None else float(np.random.default_rng(info.seed + index).random())
        return (*super().__getitem__(index), info.id if info is not None else -1, own)


class WithoutTorchs(Augmented):
    """As that, without a torch.Generator, which doesn't reach a spawned process on every system."""

    def __init__(self) -> None:
        self.python, self.jitter = random.Random(1), Jitter()

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.python.random(), self.jitter(index))


def set_up(worker: int) -> None:
    """A worker_init_fn that sets something in the worker's dataset."""
    info = get_worker_info()
    if info is None or not isinstance(info.dataset, Augmented):
        raise TypeError("not the dataset that was given")
    info.dataset.python = random.Random(worker)  # type: ignore[attr-defined]


def loader(data: Any = None, batch: int | None = BATCH, **options: Any) -> ResumableLoader:
    return ResumableLoader(DataLoader(Augmented() if data is None else data, batch, **options))


def seed(number: int = 7) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws(shared: Any = None) -> tuple[float, ...]:
    """One draw of each global generator, as a training step makes with dropout or label noise.

    Args:
        shared: A generator that is drawn from too.
    """
    own = () if shared is None else (shared.random(),)
    return random.random(), float(np.random.random()), float(torch.rand(())), *own


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


def train(loader: ResumableLoader, steps: int, after: Callable[[int], None] | None = None) -> Iterator[Any]:
    """`steps` steps over as many epochs as it takes; after(step) is called where a snapshot would be made."""
    done = 0
    while done < steps:
        for batch in loader:
            yield plain(batch), draws(getattr(loader.sampler, "shared", None))
            done += 1
            if after is not None:
                after(done)
            if done == steps:
                return


def position(loader: ResumableLoader) -> Any:
    return copy.deepcopy((loader.state_dict(), capture_rng_state()))


def trace(make: Make, steps: int = STEPS) -> tuple[list[Any], list[Any]]:
    """The uninterrupted run, and a position before its first step and after each."""
    seed()
    running = make()
    positions = [position(running)]
    return list(train(running, steps, lambda _: positions.append(position(running)))), positions


def resume(make: Make, at: Any) -> ResumableLoader:
    """A new process as far as the loader can tell: other seeds, a new loader, restored, RNG last."""
    seed(0)
    resumed = make()
    state, rng = copy.deepcopy(at)
    resumed.check_state_dict(state)
    resumed.load_state_dict(state)
    restore_rng_state(rng)
    return resumed


def assert_exact(
    make: Make, cuts: Iterable[int] | None = None, *, steps: int = STEPS, ahead: int = STEPS, by: str = ""
) -> None:
    """A run cut at each place sees what the uninterrupted one saw, for `ahead` steps, and stands where it stood."""
    whole, positions = trace(make, steps)
    for cut in range(steps) if cuts is None else cuts:
        resumed = resume(make, positions[cut])
        upto, stood = min(cut + ahead, steps), []
        seen = list(train(resumed, upto - cut, lambda _, of=resumed, stood=stood: stood.append(position(of))))  # type: ignore[misc]
        assert seen == whole[cut:upto], f"cut after step {cut}"
        for step, (own, rng) in enumerate(stood, cut + 1):
            assert different(own, positions[step][0]) == [], f"cut after step {cut}, at {step}"
            assert repr(rng) == repr(positions[step][1]), f"cut after step {cut}, at {step}"
        if by and positions[cut][0]["pass"] is not None:
            assert resumed.resumed_by.startswith(by), resumed.resumed_by


def different(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two positions differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [at for key in one for at in different(one[key], other[key], f"{path}[{key!r}]")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            at
            for n, pair in enumerate(zip(one, other, strict=True))
            for at in different(*pair, f"{path}[{n}]")
        ]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return [] if np.array_equal(one, other) else [path]
    return [] if one == other else [f"{path}: {str(one)[:60]} {str(other)[:60]}"]
