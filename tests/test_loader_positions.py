"""A position is plain, small, the same after storing; another loader's is refused and changes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

import ckptd
from ckptd import ResumableLoader, capture_rng_state
from ckptd.errors import InvalidArgument, StateMismatch
from ckptd.loop.loader_position import SCHEMA
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from loader_trace import SAMPLES, WithOwnGenerators, loader, position, resume, seed, trace, train


def with_all() -> ResumableLoader:
    return loader(WithOwnGenerators(), shuffle=True, generator=torch.Generator())


def in_mid_epoch() -> dict[str, Any]:
    running = with_all()
    next(iter(running))
    return running.state_dict()


def moved(**change: Any) -> dict[str, Any]:
    state = in_mid_epoch()
    return {**state, "kind": {**state["kind"], **change}}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.slow
def test_a_position_survives_being_stored(tmp_path: Path, workers: int, persistent: bool) -> None:
    def make() -> ResumableLoader:
        return loader(
            WithOwnGenerators(),
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
        )

    seed()
    running = make()
    list(train(running, 1))
    batches = iter(running)
    next(batches)
    ckptd.save(tmp_path / "c", {"loader": running}, step=1)
    whole = [item[0].tolist() for item in batches]
    state = {"loader": make()}
    apply_state(state, ckptd.load(tmp_path / "c"))
    assert [item[0].tolist() for item in state["loader"]] == whole


def leaves(value: Any) -> set[type]:
    if isinstance(value, dict):
        return set().union(*map(leaves, value), *map(leaves, value.values()))
    return set().union(*map(leaves, value)) if isinstance(value, list) else {type(value)}


@pytest.mark.slow
def test_a_position_is_plain_holds_no_tensor_and_does_not_grow() -> None:
    running = loader(WithOwnGenerators(), shuffle=True, num_workers=2, persistent_workers=True)
    sizes = []
    for _ in train(running, 12):
        state = running.state_dict()
        assert leaves(state) <= {str, bytes, int, float, bool, type(None)}
        assert capture({"loader": state}, rng=False).data_bytes == 0
        sizes.append(len(repr(state)))
    assert max(sizes) < 1.1 * sizes[1]  # from then on it holds a batch of either worker


@pytest.mark.slow
def test_taking_the_position_takes_well_under_a_millisecond() -> None:
    running = with_all()
    batches = iter(running)
    next(batches), next(batches)
    times = []
    for _ in range(200):
        begun = time.thread_time()
        running.state_dict()
        times.append(time.thread_time() - begun)
    assert sorted(times)[len(times) // 4] < 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [({"batch_size": 4}, "batch_size"), ({"length": 5}, "length"), ({"sampler": "Other"}, "sampler")],
)
def test_a_position_of_another_loader_is_refused_and_changes_nothing(
    change: dict[str, Any], said: str
) -> None:
    running, state = with_all(), moved(**change)
    before = repr(position(running))
    with pytest.raises(StateMismatch, match=f"loader.{said}"):
        running.check_state_dict(state)
    with pytest.raises(StateMismatch, match=f"loader.{said}"):
        running.load_state_dict(state)
    assert repr(position(running)) == before


@pytest.mark.parametrize("change", [{"sampler": RandomSampler(range(SAMPLES), True)}, {"drop_last": True}])
def test_a_loader_made_otherwise_refuses_the_position(change: dict[str, Any]) -> None:
    running = loader(**change)
    next(iter(running))
    with pytest.raises(StateMismatch):
        loader().load_state_dict(running.state_dict())


def test_other_generators_of_its_own_are_refused() -> None:
    with pytest.raises(StateMismatch, match="other generators"):
        loader(shuffle=True, generator=torch.Generator()).check_state_dict(in_mid_epoch())
    with pytest.raises(StateMismatch, match="other generators"):
        with_all().check_state_dict(loader(shuffle=True).state_dict())


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "not the position"),
        ([1], "not the position"),
        ({"schema": "ckptd.loader.v9"}, "'ckptd.loader.v9'"),
        ({"schema": SCHEMA}, "damaged position"),
    ],
)
def test_what_is_no_position_is_refused_by_name(state: Any, said: str) -> None:
    with pytest.raises(StateMismatch, match=said):
        loader().load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "1"},
        {"epoch": torch.zeros(3)},
        {"pass": {}},
        {"pass": {"changed": torch.zeros(3)}},
        {"more": 1},
        {"now": None},
    ],
)
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(StateMismatch, match="damaged"):
        with_all().check_state_dict({**in_mid_epoch(), **change})


def test_a_position_beyond_the_end_of_the_loader_is_refused_and_leaves_the_generators() -> None:
    state = in_mid_epoch()
    running = with_all()
    running.load_state_dict({**state, "pass": {**state["pass"], "steps": 5}})
    rng = repr(capture_rng_state())
    with pytest.raises(StateMismatch, match="ends before"):
        iter(running)
    assert repr(capture_rng_state()) == rng


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_taken_earlier_is_not_changed_by_later_steps(workers: int) -> None:
    running = loader(WithOwnGenerators(), num_workers=workers)
    batches = iter(running)
    next(batches)
    state = running.state_dict()
    before = repr(state)
    list(batches)
    assert repr(state) == before


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("yielded", [0, 1, 4])
def test_an_iterator_of_before_a_restore_is_refused_and_a_new_one_goes_on(
    workers: int, persistent: bool, yielded: int
) -> None:
    running = loader(num_workers=workers, persistent_workers=persistent and workers > 0)
    batches = iter(running)
    for _ in range(yielded):
        next(batches)
    at = running.state_dict()
    running.load_state_dict(at)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"restored since this iterator was made.*begin a new one"):
            next(batches)
    new = iter(running)
    assert len(list(new)) == 4 - yielded
    with pytest.raises(InvalidArgument):
        next(batches)


def test_checking_a_position_changes_nothing() -> None:
    _, positions = trace(with_all, 3)
    running = with_all()
    before = repr(position(running))
    running.check_state_dict(positions[3][0])
    assert repr(position(running)) == before
    assert resume(with_all, positions[3]).batch_in_epoch == 3
