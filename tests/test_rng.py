from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.errors import CheckpointWarning, StateMismatch
from ckptd.tensors.number_lists import pack_numbers
from ckptd.tensors.rng import packed_rng_state


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = ckptd.capture_rng_state()
    yield
    ckptd.restore_rng_state(before)


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        torch.randperm(5).tolist(),
    ]


def test_the_next_draws_after_a_restore_are_those_after_the_capture() -> None:
    draws()  # leaves a cached gauss in each
    state = ckptd.capture_rng_state()
    first = draws()
    ckptd.restore_rng_state(state)
    assert draws() == first


def test_capturing_draws_nothing() -> None:
    ckptd.restore_rng_state(state := ckptd.capture_rng_state())
    first = draws()
    ckptd.restore_rng_state(state)
    for _ in range(3):
        ckptd.capture_rng_state()
    assert draws() == first


def test_a_snapshot_has_the_generators_words_packed_as_their_lists_would_be() -> None:
    lists, packed = ckptd.capture_rng_state(), packed_rng_state()
    assert packed["python"] == [lists["python"][0], pack_numbers(lists["python"][1]), lists["python"][2]]
    assert packed["numpy"] == ["MT19937", pack_numbers(lists["numpy"][1]), *lists["numpy"][2:]]
    assert torch.equal(packed["torch"], lists["torch"]) and packed["cuda"] == lists["cuda"]


def test_the_state_is_loaded_by_weights_only() -> None:
    file = io.BytesIO()
    torch.save(ckptd.capture_rng_state(), file)
    file.seek(0)
    first = draws()
    ckptd.restore_rng_state(torch.load(file, weights_only=True))
    file.seek(0)
    ckptd.restore_rng_state(torch.load(file, weights_only=True))
    assert draws() == first


def test_the_plain_lists_of_format_v1_are_taken() -> None:
    state = ckptd.capture_rng_state()
    first = draws()
    old = {
        "python": state["python"],
        "numpy": state["numpy"],
        "torch": state["torch"].tolist(),
        "cuda": [],
    }
    ckptd.restore_rng_state(old)
    assert draws() == first


def test_another_global_bit_generator_of_numpy_is_kept_too() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        state = ckptd.capture_rng_state()
        first = draws()
        ckptd.restore_rng_state(state)
        assert draws() == first
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize(
    "broken",
    [
        {"python": None},
        {"python": [3, [1, 2, 3], None]},
        {"numpy": ["MT19937", [1, 2], 0, 0, 0.0]},
        {"numpy": ["PCG64", [1] * 624, 0, 0, 0.0]},
        {"numpy": 3},
        {"torch": [1, 2, 3]},
        {"torch": [300]},
        {"torch": "x"},
        {"cuda": [None]},
    ],
)
def test_a_state_that_is_none_is_refused_and_nothing_is_set(broken: dict[str, Any]) -> None:
    state = ckptd.capture_rng_state()
    draws()
    now = ckptd.capture_rng_state()
    first = draws()
    ckptd.restore_rng_state(now)
    with pytest.raises(StateMismatch, match="rng"):
        ckptd.restore_rng_state(state | broken)
    assert draws() == first


def test_a_missing_part_is_named() -> None:
    state = ckptd.capture_rng_state()
    del state["numpy"]
    with pytest.raises(StateMismatch, match="numpy"):
        ckptd.restore_rng_state(state)


def test_states_of_four_cuda_devices_on_a_host_without_cuda_are_said_and_skipped() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has CUDA")
    state = ckptd.capture_rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 4}
    first = draws()
    with pytest.warns(CheckpointWarning, match="4 CUDA devices, this host has 0"):
        ckptd.restore_rng_state(state)
    assert draws() == first


def test_without_cuda_states_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptd.restore_rng_state(ckptd.capture_rng_state())
