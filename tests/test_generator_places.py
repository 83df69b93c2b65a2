"""A generator's state with a place beyond its words: NumPy and torch take it, and the next draw reads other memory."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.errors import CorruptCheckpoint, StateMismatch
from ckptd.tensors.rng import capture_rng_state, plan_rng
from ckptd.tensors.tag_reader import decode
from ckptd.tensors.tags import encode

PLACES = [2_000_000_000, 625, -1]


def beyond(state: torch.Tensor) -> bytes:
    """A state of torch's, which counts from the start and from the end."""
    changed = bytearray(state.numpy().tobytes())
    struct.pack_into("=iiQ", changed, 8, 600, 1, 600)
    return bytes(changed)


def stored(generator: Any) -> dict[str, Any]:
    tag = encode(generator, ("g",))
    assert tag is not None
    return tag


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("place", PLACES)
def test_a_global_generators_place_beyond_its_words_is_refused(place: int) -> None:
    state = capture_rng_state()
    state["numpy"][2] = place
    with pytest.raises(StateMismatch, match="pos isn't between 0 and 624"):
        plan_rng(state)
    state["numpy"] = {"bit_generator": "MT19937", "state": {"pos": place}}
    with pytest.raises(StateMismatch, match="pos isn't between 0 and 624"):
        plan_rng(state)


def test_torchs_global_place_beyond_its_words_is_refused() -> None:
    state = capture_rng_state()
    state["torch"] = beyond(state["torch"])
    with pytest.raises(StateMismatch, match="beyond the state's end"):
        plan_rng(state)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [np.random.RandomState, lambda: np.random.Generator(np.random.MT19937())])
def test_a_stored_generators_place_beyond_its_words_is_refused(make: Any, place: int) -> None:
    tag = stored(make())
    tag["state"]["state"]["pos"] = place
    with pytest.raises(CorruptCheckpoint, match="pos isn't between 0 and 624"):
        decode(tag)


def test_a_stored_philoxs_place_beyond_its_buffer_is_refused() -> None:
    tag = stored(np.random.Generator(np.random.Philox()))
    tag["state"]["buffer_pos"] = 5
    with pytest.raises(CorruptCheckpoint, match="buffer_pos isn't between 0 and 4"):
        decode(tag)


def test_a_stored_torch_generators_place_beyond_its_words_is_refused() -> None:
    tag = stored(torch.Generator())
    tag["state"] = beyond(torch.Generator().get_state())
    with pytest.raises(CorruptCheckpoint, match="beyond the state's end"):
        decode(tag)


@pytest.mark.parametrize("draws", [0, 1, 311, 312, 623, 624, 625])
def test_every_place_that_a_generator_comes_to_is_taken(draws: int) -> None:
    of_torch, of_numpy, philox = torch.Generator(), np.random.RandomState(), np.random.Philox()
    for _ in range(draws):
        torch.rand(1, generator=of_torch)
        of_numpy.randint(2**31)
        philox.random_raw()
    torch.randn(draws + 1, generator=of_torch)
    assert torch.equal(decode(stored(of_torch)).get_state(), of_torch.get_state())
    assert same(decode(stored(of_numpy)).get_state(), of_numpy.get_state())
    assert same(decode(stored(np.random.Generator(philox))).bit_generator.state, philox.state)
