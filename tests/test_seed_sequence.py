"""NumPy Generators spawn after a resume what they would have spawned: the seed sequence goes on, not only the draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import PCG64, Generator, SeedSequence

import ckptd
from ckptd.errors import CorruptCheckpoint
from ckptd.tensors.capture import capture
from ckptd.tensors.generator_places import PLACES
from ckptd.tensors.generator_state import set_generator
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.seed_sequence import (
    MAX_ADVANCE,
    UnknownSeed,
    continue_spawning,
    seed_from_plain,
    seed_to_plain,
)
from ckptd.tensors.tag_reader import decode
from ckptd.tensors.tags import encode
from round_trip import LAYOUT_IDS, LAYOUTS, through_disk

#: Whether a bit generator takes another seed sequence in place of its own: since NumPy 2.0.
REPLACES = isinstance(PCG64(1).__getstate__(), tuple)


class Fixed(PCG64):
    """As a bit generator before NumPy 2.0: its state is all that can be set."""

    def __getstate__(self) -> Any:
        return self.state


Fixed.__name__ = "PCG64"  # a state is only for a bit generator of its name


def made(seed: Any, kind: str = "PCG64", spawned: int = 0) -> Generator:
    generator = Generator(getattr(np.random, kind)(seed))
    generator.spawn(spawned)
    return generator


def fixed(seed: Any, spawned: int = 0) -> Generator:
    generator = Generator(Fixed(seed))
    generator.bit_generator.seed_seq.spawn(spawned)  # type: ignore[attr-defined]
    return generator


def children(generator: Generator) -> list[Any]:
    """What the next children draw, and a grandchild of the second."""
    first, second = generator.bit_generator.seed_seq.spawn(2)  # type: ignore[attr-defined]
    seeds = [first, second, *second.spawn(1)]
    return [Generator(PCG64(seed)).integers(2**60, size=3).tolist() for seed in seeds]


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("kind", PLACES)
def test_a_generator_of_the_same_seed_spawns_on(kind: str, sharding: ckptd.Sharding, tmp_path: Path) -> None:
    stored = made(7, kind, spawned=3)
    path = ckptd.save(
        tmp_path / "c", {"g": stored, "below": [(stored.spawn(1)[0],)]}, step=1, sharding=sharding
    )
    live, below = made(7, kind), made(7, kind, spawned=3).spawn(1)[0]
    state = {"g": live, "below": [(below,)]}
    apply_state(state, ckptd.load(path))
    assert state["g"] is live and state["below"][0][0] is below  # type: ignore[index]
    wanted, loaded = children(stored), ckptd.load(path)["g"]
    assert children(live) == children(loaded) == wanted
    assert children(below) == children(made(7, kind, spawned=3).spawn(1)[0])
    assert live.random() == loaded.random() == stored.random()


def test_a_capture_spawns_nothing(tmp_path: Path) -> None:
    stored, twin = made(7, spawned=2), made(7, spawned=2)
    ckptd.save(tmp_path / "c", {"g": stored}, step=1)
    assert children(stored) == children(twin)


@pytest.mark.parametrize("make", [made, fixed])
def test_whoever_else_holds_the_seed_sequence_spawns_on_too(make: Any) -> None:
    seed = SeedSequence(7)
    live = make(seed)
    set_generator(live, made(7, spawned=2500), ("g",))
    assert seed.n_children_spawned == 2500
    assert live.bit_generator.seed_seq is seed


OTHERS: dict[str, Any] = {
    "another seed": lambda make: make(8),
    "none given": lambda make: make(None),
    "another key": lambda make: make(SeedSequence(7, spawn_key=(1,))),
    "another pool": lambda make: make(SeedSequence(7, pool_size=8)),
    "spawned more": lambda make: make(7, spawned=4),
}


@pytest.mark.skipif(not REPLACES, reason="this NumPy can't replace the seed sequence of a bit generator")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_generator_of_another_seed_or_one_that_spawned_more_spawns_on(kind: str, tmp_path: Path) -> None:
    stored, live = made(7, spawned=3), OTHERS[kind](made)
    loaded = through_disk(tmp_path, {"g": stored})
    apply_state({"g": live}, loaded)
    assert live.bit_generator.seed_seq is not loaded["g"].bit_generator.seed_seq
    assert children(live) == children(stored)


@pytest.mark.parametrize("kind", OTHERS)
def test_where_numpy_cant_replace_the_seed_it_is_said_by_key_path_that_spawn_doesnt_go_on(kind: str) -> None:
    live = OTHERS[kind](fixed)
    (said,) = set_generator(live, made(7, spawned=3), ("g", "mine"))
    assert said.startswith("state['g']['mine']: its draws go on, but spawn() doesn't")
    assert live.bit_generator.state == made(7).bit_generator.state


def test_where_nothing_was_spawned_before_the_checkpoint_nothing_is_said_of_another_seed() -> None:
    assert set_generator(fixed(8), made(7), ("g",)) == []
    assert set_generator(
        fixed(7, spawned=1), made(7), ("g",)
    )  # the same seed: the children of before are lost


def test_a_great_many_children_are_not_spawned_to_catch_up() -> None:
    many = SeedSequence(7, n_children_spawned=MAX_ADVANCE + 1)
    live = made(7)
    assert continue_spawning(live.bit_generator, many) == REPLACES
    assert not continue_spawning(fixed(7).bit_generator, many)
    if REPLACES:
        assert live.bit_generator.seed_seq.n_children_spawned == MAX_ADVANCE + 1  # type: ignore[attr-defined]


def test_a_generator_of_an_older_checkpoint_is_read_and_leaves_the_live_seed_alone() -> None:
    tag = encode(made(8, spawned=3), ("g",))
    assert tag is not None
    del tag["seed"]
    old = decode(dict(tag))
    assert encode(old, ("g",)) == tag  # and is stored again as one whose seed isn't known
    live = made(7, spawned=1)
    set_generator(live, old, ("g",))
    assert live.bit_generator.state == made(8).bit_generator.state
    assert children(live) == children(made(7, spawned=1))


def test_a_generator_without_a_seed_sequence_is_stored_without_one() -> None:
    """Seeded as in NumPy 1.16: it can't spawn."""
    bits = np.random.RandomState(1)._bit_generator
    assert bits.seed_seq is None
    tag = encode(Generator(bits), ("g",))
    assert tag is not None and "seed" not in tag
    apply_state({"g": Generator(bits)}, {"g": decode(tag), "rng": ckptd.capture_rng_state()})
    assert bits.seed_seq is None


def test_a_seed_sequence_of_another_class_is_not_taken_for_numpys() -> None:
    class Own(SeedSequence):
        pass

    assert seed_to_plain(PCG64(Own(1))) is None
    assert seed_to_plain(PCG64(UnknownSeed())) is None
    assert seed_to_plain(PCG64(SeedSequence(1, pool_size=300))) is None


SEEDS: dict[str, Any] = {
    "int": {"entropy": 5},
    "long": {"entropy": 2**4096 + 1},
    "numpy int": {"entropy": np.uint64(5)},
    "list": {"entropy": [1, [2**70, 0], "0x1f", np.int64(3)]},
    "range": {"entropy": range(5)},
    "array": {"entropy": np.arange(9, dtype=np.uint32)},
    "key": {"entropy": 5, "spawn_key": (1, np.int64(2), 2**40)},
    "nested key": {"entropy": 5, "spawn_key": [[1, 2], 3]},
    "pool": {"entropy": 5, "pool_size": 9, "n_children_spawned": 2**32 - 1},
    "nothing": {"entropy": []},
}


@pytest.mark.parametrize("kind", SEEDS)
def test_every_kind_of_entropy_comes_back_as_the_same_seed(kind: str, tmp_path: Path) -> None:
    given = SeedSequence(**SEEDS[kind])
    loaded = through_disk(tmp_path, {"g": Generator(PCG64(given))})["g"].bit_generator.seed_seq
    assert loaded.generate_state(8).tolist() == given.generate_state(8).tolist()
    assert (loaded.pool_size, loaded.n_children_spawned) == (given.pool_size, given.n_children_spawned)
    if kind != "pool":
        assert loaded.spawn(1)[0].generate_state(8).tolist() == given.spawn(1)[0].generate_state(8).tolist()
    live = Generator(Fixed(SeedSequence(**{**SEEDS[kind], "n_children_spawned": given.n_children_spawned})))
    assert continue_spawning(live.bit_generator, loaded)


HOSTILE: list[Any] = [
    3,
    {},
    {"n_children_spawned": -1},
    {"n_children_spawned": 2**32},
    {"n_children_spawned": 1.0},
    {"pool_size": 3},
    {"pool_size": 257},
    {"pool_size": "4"},
    {"entropy": None},
    {"entropy": -1},
    {"entropy": 1.5},
    {"entropy": ["x"]},
    {"entropy": {"a": 1}},
    {"spawn_key": None},
    {"spawn_key": 3},
    {"spawn_key": [-1]},
]


@pytest.mark.parametrize("change", HOSTILE, ids=repr)
def test_a_seed_that_is_none_is_refused(change: Any) -> None:
    tag = encode(made(7), ("g",))
    assert tag is not None
    tag["seed"] = {**tag["seed"], **change} if isinstance(change, dict) and change else change
    with pytest.raises(CorruptCheckpoint, match="numpy-generator"):
        decode(tag)


def test_an_unknown_seed_is_random() -> None:
    assert seed_from_plain(None).entropy != seed_from_plain(None).entropy


def test_the_tag_holds_plain_values_only() -> None:
    key: Any = (np.int64(1),)
    seed = SeedSequence(np.arange(3), spawn_key=key, n_children_spawned=2)
    captured = capture({"g": Generator(PCG64(seed))}, rng=False).state["g"]["seed"]
    assert captured == {"entropy": [0, 1, 2], "spawn_key": [1], "pool_size": 4, "n_children_spawned": 2}
    assert {type(word) for word in (*captured["entropy"], *captured["spawn_key"])} == {int}
