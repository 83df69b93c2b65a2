"""What stands at two places of the state, or lies twice in one memory, comes to what was stored, or is refused."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.tag_reader import GeneratorElsewhere
from ckptd.tensors.tied_values import same_stored
from round_trip import same, through_disk
from test_restoring import Counters


@ckptd.register_type
class Stage(enum.Enum):
    FIRST = 1
    LAST = 2


@ckptd.register_type
@dataclass(frozen=True)
class Mark:
    step: int
    value: Any = None


@ckptd.register_type
@dataclass
class Mutable:
    step: int


def frozen_array(value: float) -> np.ndarray:
    array = np.full(2, value)
    array.flags.writeable = False
    return array


IMMUTABLE: dict[str, tuple[Any, Any]] = {
    "enum": (Stage.FIRST, Stage.LAST),
    "dtype": (torch.float32, torch.bfloat16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "range": (range(3), range(4)),
    "NumPy scalar": (np.float32(0), np.float32(1)),
    "frozen dataclass": (Mark(1), Mark(2)),
    "read-only array": (frozen_array(0), frozen_array(1)),
    "frozenset": (frozenset({1}), frozenset({2})),
    "tuple": ((1, 2), (3, 4)),
}


@pytest.mark.parametrize("kind", IMMUTABLE)
@pytest.mark.parametrize("strict", [True, False])
def test_an_immutable_value_at_two_names_may_become_two(kind: str, strict: bool, tmp_path: Path) -> None:
    now, then = IMMUTABLE[kind]
    state = {"last": now, "best": now, "deep": [now, {"x": now}]}
    saved = {"last": then, "best": now, "deep": [now, {"x": then}]}
    apply_state(state, through_disk(tmp_path, saved), strict=strict)
    assert same(state, saved)


def test_an_immutable_holder_of_an_object_may_become_two_that_hold_it(tmp_path: Path) -> None:
    held = Mark(1, meter := Counters(1))
    state = {"last": held, "best": held}
    apply_state(state, through_disk(tmp_path, {"last": Mark(1, Counters(5)), "best": Mark(2, Counters(5))}))
    assert (state["last"].step, state["best"].step, meter.n) == (1, 2, 5)
    assert state["last"].value is meter is state["best"].value


@pytest.mark.parametrize(
    ("live", "one", "other"),
    [
        ({"a": 1}, {"a": 2}, {"a": 3}),
        ({1}, {2}, {3}),
        (bytearray(b"a"), bytearray(b"b"), bytearray(b"c")),
        (np.zeros(2), np.ones(2), np.zeros(2)),
        (Mutable(1), Mutable(2), Mutable(3)),
    ],
)
def test_mutable_data_at_two_names_stays_one_where_its_values_agree_and_becomes_two_else(
    live: Any, one: Any, other: Any
) -> None:
    state = {"a": live, "b": live}
    apply_state(state, {"a": copy.deepcopy(one), "b": copy.deepcopy(one)}, only=["a", "b"])
    assert state["a"] is live is state["b"]
    assert same(live, one)
    apply_state(state, {"a": copy.deepcopy(other), "b": copy.deepcopy(one)}, only=["a", "b"])
    assert state["a"] is live
    assert same(state, {"a": other, "b": one})


def test_a_list_at_two_names_is_compared_to_the_bit_whatever_it_holds() -> None:
    def stored(value: float) -> list[Any]:
        return [Mark(1, torch.full((2,), value)), np.float32("nan"), GeneratorElsewhere("cuda:0", b"1")]

    assert same_stored(stored(1.0), stored(1.0))
    assert not same_stored(stored(1.0), stored(2.0))
    assert not same_stored(np.float32(0.0), np.float32(-0.0))
    assert not same_stored(GeneratorElsewhere("cuda:0", b"1"), GeneratorElsewhere("cuda:0", b"2"))


# --- one memory -------------------------------------------------------------------------------------


def refused(state: dict[str, Any], stored: dict[str, Any], match: str) -> None:
    before = copy.deepcopy(state)
    with pytest.raises(StateMismatch, match=match):
        apply_state(state, stored, only=list(state))
    assert same(state, before)


def test_a_tensor_that_overlaps_itself_takes_only_values_that_do_too() -> None:
    memory = torch.zeros(6)
    view = memory.unfold(0, 3, 1)
    refused({"v": view}, {"v": torch.randn(4, 3)}, r"state\['v'\] shares its memory between its own elements")
    state = {"v": view}
    apply_state(state, {"v": torch.arange(6.0).unfold(0, 3, 1).clone()}, only=["v"])
    assert state["v"] is view and memory.tolist() == [0, 1, 2, 3, 4, 5]
    refused({"v": view, "w": view}, {"v": (x := torch.randn(4, 3)), "w": x}, "shares its memory")


def test_a_buffer_that_overlaps_itself_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("b", torch.zeros(6).unfold(0, 3, 1))
    stored = {**model.state_dict(), "b": torch.randn(4, 3)}
    with pytest.raises(StateMismatch, match=r"\['b'\] shares its memory between its own elements"):
        apply_state({"m": model}, {"m": stored}, only=["m"])
    assert model.b.count_nonzero() == 0  # type: ignore[operator,union-attr]


def test_a_tensor_with_strides_in_an_odd_order_doesnt_overlap_itself() -> None:
    live = torch.zeros(2, 3, 4).permute(2, 0, 1)[::2]
    stored = torch.randn(2, 2, 3)
    apply_state({"t": live}, {"t": stored}, only=["t"])
    assert same(live, stored)


ARRAYS: dict[str, Any] = {
    "transposed": lambda a: a.T,
    "every other column": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1],
    "a row": lambda a: a[1],
}


@pytest.mark.parametrize("view", ARRAYS)
def test_arrays_that_share_their_memory_in_any_layout_are_compared(view: str) -> None:
    array = np.zeros((4, 4))
    state = {"a": array, "v": (held := ARRAYS[view](array))}
    values = np.arange(16.0).reshape(4, 4)
    apply_state(state, {"a": values, "v": ARRAYS[view](values).copy()}, only=["a", "v"])
    assert same(array, values) and state["v"] is held
    apply_state(state, {"a": values, "v": (own := np.full(held.shape, 99.0))}, only=["a", "v"])
    assert same(state, {"a": values, "v": own}) and state["a"] is array


@pytest.mark.parametrize("alias", [lambda a: a, lambda a: a[:], lambda a: a.view()])
def test_a_kept_array_that_is_another_gets_its_own_where_its_value_is_another(alias: Any) -> None:
    array = np.zeros(3)
    state = {"now": array, "best": alias(array)}
    apply_state(state, {"now": np.ones(3), "best": np.ones(3)}, only=["now", "best"])
    assert np.shares_memory(state["now"], state["best"])
    apply_state(state, {"now": np.zeros(3), "best": np.ones(3)}, only=["now", "best"])
    assert state["now"] is array and same(state, {"now": np.zeros(3), "best": np.ones(3)})


def test_an_array_whose_elements_are_one_takes_equal_values_only() -> None:
    memory = np.zeros(4)
    array = np.lib.stride_tricks.as_strided(memory, (3, 4), (0, 8))
    with pytest.raises(StateMismatch, match="shares its memory between its own elements"):
        apply_state({"a": array}, {"a": np.arange(12.0).reshape(3, 4)}, only=["a"])
    assert memory.tolist() == [0, 0, 0, 0]
    apply_state({"a": array}, {"a": np.tile(np.arange(4.0), (3, 1))}, only=["a"])
    assert memory.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["S3", "U2", "M8[s]", "u2", "longdouble", "c16", "i4,f8", "?", ">f4"])
def test_arrays_of_every_dtype_are_restored_in_place_in_any_layout(dtype: str) -> None:
    stored = np.arange(6).astype("u1").astype(dtype).reshape(2, 3)
    live = np.zeros((3, 2), dtype).T[::-1]
    apply_state({"a": live}, {"a": stored}, only=["a"])
    assert live.tolist() == stored.tolist()
    scalar = np.zeros((), dtype)
    apply_state({"a": scalar}, {"a": stored[1:, 2:].reshape(())}, only=["a"])
    assert scalar.tolist() == stored[1, 2].tolist()


def test_a_bytearray_that_something_views_is_written_in_place(tmp_path: Path) -> None:
    live = bytearray(4)
    view = np.frombuffer(live, np.uint8)
    state = {"b": live}
    apply_state(state, through_disk(tmp_path, {"b": bytearray(b"1234")}))
    assert state["b"] is live
    assert view.tobytes() == b"1234"


def test_a_bytearray_that_cant_be_resized_is_replaced(tmp_path: Path) -> None:
    live = bytearray(4)
    view = memoryview(live)
    state = {"b": live}
    apply_state(state, through_disk(tmp_path, {"b": bytearray(b"12345")}))
    assert state["b"] == b"12345"
    assert view.tobytes() == bytes(4)


def test_a_bytearray_and_its_view_are_compared() -> None:
    live = bytearray(4)
    state = {"b": live, "v": (view := np.frombuffer(live, np.uint8))}
    apply_state(state, {"b": bytearray(b"1234"), "v": np.frombuffer(b"1234", np.uint8)}, only=["b", "v"])
    assert state["b"] is live and state["v"] is view and live == b"1234"
    apply_state(state, {"b": bytearray(b"5678"), "v": np.zeros(4, np.uint8)}, only=["b", "v"])
    assert state["b"] is live and live == b"5678"
    assert state["v"].tolist() == [0, 0, 0, 0]
