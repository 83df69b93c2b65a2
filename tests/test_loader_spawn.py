"""Datasets and samplers whose NumPy Generators spawn: a resumed epoch spawns the same children."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Sampler

from ckptd import ResumableLoader
from ckptd.errors import CheckpointWarning
from ckptd.loop.loader_rng import new_generator, read_generator, set_generator
from loader_trace import SAMPLES, Augmented, assert_exact


class Spawning(Augmented):
    """A child for every sample, and one that stays."""

    def __init__(self, seed: int | None) -> None:
        self.rng = np.random.default_rng(seed)
        self.kept = np.random.default_rng(np.random.SeedSequence(seed or 5, spawn_key=(3,)))

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 0:
            self.kept = self.kept.spawn(1)[0]
        return index, self.rng.spawn(1)[0].random(), self.kept.random()


class SpawningSampler(Sampler[int]):
    """A child for every epoch."""

    def __init__(self, seed: int | None) -> None:
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.spawn(1)[0].permutation(SAMPLES).tolist())


REPLACES = isinstance(
    np.random.PCG64(1).__getstate__(), tuple
)  # the seed of a bit generator: since NumPy 2.0


@pytest.mark.slow
@pytest.mark.skipif(not REPLACES, reason="this NumPy can't set back how many children were spawned")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seed", [1, None], ids=["seeded", "unseeded"])
def test_children_are_the_same_at_every_cut(workers: int, persistent: bool, seed: int | None) -> None:
    if persistent and not workers:
        pytest.skip("there are no workers")

    def make() -> ResumableLoader:
        sampler = SpawningSampler(seed)
        return ResumableLoader(
            DataLoader(Spawning(seed), 3, sampler=sampler, num_workers=workers, persistent_workers=persistent)
        )

    assert_exact(make)


class Fixed(np.random.PCG64):
    """As before NumPy 2.0: its state is all that can be set."""

    def __getstate__(self) -> Any:
        return self.state


Fixed.__name__ = "PCG64"  # a state is only for a bit generator of its name


def test_children_that_will_be_others_are_said() -> None:
    ahead, behind = np.random.Generator(Fixed(7)), np.random.default_rng(7)
    behind.spawn(2)
    set_generator(ahead, read_generator(behind))
    assert ahead.bit_generator.seed_seq.n_children_spawned == 2  # type: ignore[attr-defined]
    with pytest.warns(CheckpointWarning, match="will spawn other generators"):
        set_generator(ahead, read_generator(np.random.default_rng(7)))


def test_a_generator_made_of_its_state_spawns_the_same_children_and_an_older_state_does_without() -> None:
    generator = np.random.default_rng(7)
    generator.spawn(2)
    state = read_generator(generator)
    made = new_generator(state)
    assert isinstance(made, np.random.Generator)
    set_generator(other := np.random.default_rng(7), state[:3])
    assert other.bit_generator.seed_seq.n_children_spawned == 0  # type: ignore[attr-defined]
    if REPLACES:
        assert made.spawn(1)[0].random() == generator.spawn(1)[0].random()
    assert made.random() == other.random() == generator.random()
