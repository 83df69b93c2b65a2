"""A stored value of another kind than the live one is refused by its key path; what may change its kind is listed."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.registered_tags import Unbuilt
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_restoring import Counters

Pair = namedtuple("Pair", "a b")
Triple = namedtuple("Triple", "a b c")


@ckptd.register_type
class Phase(enum.Enum):
    WARM = 1
    HOT = 2


@ckptd.register_type
class Level(enum.IntEnum):
    LOW = 1


@ckptd.register_type
@dataclass
class Progress:
    best: float = 0.0


def restore(live: Any, stored: Any, **options: Any) -> Any:
    """What stands where live stood."""
    state = {"x": [{"v": live}]}
    apply_state(state, {"x": [{"v": stored}]}, only=["x"], **options)
    return state["x"][0]["v"]


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "array, other shape": (np.zeros(3), np.ones(4), r"has shape \[4\], live \[3\]"),
    "array, other dtype": (np.zeros(3), np.ones(3, np.float32), "is float32, live float64"),
    "generator, None": (np.random.default_rng(1), None, "is builtins.NoneType in the checkpoint, .*PCG64"),
    "list with a generator, None": (
        [np.random.default_rng(1)],
        None,
        "is builtins.NoneType in the checkpoint",
    ),
    "tensor, number": (torch.zeros(2), 1, "is builtins.int in the checkpoint, a tensor in the live state"),
    "tensor, another dtype": (
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
        "is torch.float32, live torch.int64",
    ),
    "array, text": (np.zeros(3), "x", "is builtins.str in the checkpoint, numpy.ndarray in the live"),
    "array, tensor": (np.zeros(1), torch.ones(1), ".*numpy.ndarray in the live"),
    "tuple, int": ((1, 2), 3, "is builtins.int in the checkpoint, builtins.tuple in the live"),
    "tuple, list": ((1, 2), [1, 2], "is builtins.list in the checkpoint, builtins.tuple in the live"),
    "tuple, tensor": ((1, 2), torch.ones(1), ".*builtins.tuple in the live"),
    "namedtuple, other fields": (
        Pair(1, 2),
        Triple(1, 2, 3),
        ".*Triple in the checkpoint, .*Pair in the live",
    ),
    "namedtuple, tuple": (Pair(1, 2), (1, 2), "is builtins.tuple in the checkpoint"),
    "int, dict": (1, {"a": 1}, "is builtins.dict in the checkpoint, builtins.int in the live"),
    "int, text": (1, "1", "is builtins.str in the checkpoint, builtins.int in the live"),
    "int, tensor": (1, torch.ones(2), ".* in the checkpoint, builtins.int in the live"),
    "int, array": (1, np.ones(2), "is numpy.ndarray in the checkpoint, builtins.int in the live"),
    "float, list": (1.0, [1.0], "is builtins.list in the checkpoint, builtins.float in the live"),
    "text, bytes": ("a", b"a", "is builtins.bytes in the checkpoint, builtins.str in the live"),
    "dtype, int": (torch.float32, 1, "is builtins.int in the checkpoint, torch.dtype in the live"),
    "device, text": (torch.device("cpu"), "cpu", "is builtins.str in the checkpoint"),
    "range, tuple": (range(3), (0, 1, 2), ".*builtins.range in the live"),
    "frozenset, set": (frozenset({1}), {1}, ".*builtins.frozenset in the live"),
    "enum, int": (Phase.WARM, 1, ".*Phase in the live"),
    "enum of ints, int": (Level.LOW, 1, ".*Level in the live"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_kind_is_refused_by_its_key_path_and_nothing_is_touched(case: str) -> None:
    live, stored, fault = OTHERS[case]
    before = copy.deepcopy(live)
    with pytest.raises(StateMismatch, match=rf"state\['x'\]\[0\]\['v'\] {fault}"):
        restore(live, stored)
    assert same(live, before)


LIKES: dict[str, tuple[Any, Any]] = {
    "None, number": (None, 0.3),
    "None, array": (None, np.ones(2)),
    "None, tensor": (None, torch.ones(2)),
    "None, dict": (None, {"a": [1]}),
    "None, module's state": (None, nn.Linear(1, 1).state_dict()),
    "number, None": (0.3, None),
    "tensor, None": (torch.ones(2), None),
    "array, None": (np.ones(2), None),
    "list, None": ([torch.ones(1)], None),
    "set, None": ({1}, None),
    "dataclass, None": (Progress(), None),
    "module's state, None": (dict(nn.Linear(1, 1).state_dict()), None),
    "None, list": (None, [torch.ones(1)]),
    "text, None": ("a", None),
    "tuple, None": ((1,), None),
    "dtype, None": (torch.float32, None),
    "int, float": (0, 0.3),
    "float, int": (0.3, 1),
    "int, bool": (0, True),
    "int, NumPy's": (0, np.float32(0.3)),
    "NumPy's, float": (np.float32(0), 0.3),
    "float, tensor of one": (float("inf"), torch.tensor(0.3)),
    "float, array of one": (float("inf"), np.array(0.3)),
    "text, NumPy's": ("a", np.str_("b")),
    "tuple, longer": ((1,), (1, 2, "c")),
    "namedtuple": (Pair(1, 2), Pair(3, None)),
    "dtype": (torch.float32, torch.bfloat16),
    "range": (range(3), range(1, 4)),
    "enum": (Phase.WARM, Phase.HOT),
    "a history": ([1, "a", None], [{"a": 1}, 2, "b", torch.ones(1)]),
    "grown dicts": ([], [{"a": 1}]),
}


@pytest.mark.parametrize("case", LIKES)
def test_none_and_numbers_and_their_like_are_taken_as_they_were_stored(case: str) -> None:
    live, stored = LIKES[case]
    assert same(restore(copy.deepcopy(live), copy.deepcopy(stored)), stored)


def test_not_strict_leaves_an_array_of_another_shape_alone_and_takes_other_kinds() -> None:
    array = np.zeros(3)
    state: dict[str, Any] = {"a": array, "n": 1, "t": (1,), "dtype": np.zeros(2), "none": np.zeros(1)}
    stored = {"a": np.ones(4), "n": {"b": 2}, "t": "x", "dtype": np.ones(2, np.float32), "none": None}
    report = apply_state(state, dict(stored), strict=False, only=list(state))
    assert report.reshaped == ["state['a']"]
    assert state.pop("a") is array and array.tolist() == [0, 0, 0]
    assert same(state, {name: stored[name] for name in state})


def test_an_object_that_was_none_is_refused_before_it_is_given_none(tmp_path: Path) -> None:
    for live in (Counters(4), linear(), [Counters(4)]):
        with pytest.raises(StateMismatch, match=r"state\['ema'\] is builtins.NoneType in the checkpoint"):
            apply_state({"ema": live}, through_disk(tmp_path, {"ema": None}))


def test_a_tuple_of_tensors_and_of_another_length_is_said_by_its_lengths() -> None:
    with pytest.raises(StateMismatch, match=r"\['v'\] has 1 items in the checkpoint, 2 in the live state"):
        restore((torch.zeros(1), torch.zeros(1)), (torch.ones(1),))


def test_a_registered_class_that_changed_is_listed_once() -> None:
    changed = Unbuilt("Progress", {"worst": 1.0}, "has other fields since it was saved", registered=True)
    for live in (Progress(), 3, [1], Phase.WARM, np.zeros(1)):
        with pytest.raises(StateMismatch, match="has other fields since") as caught:
            restore(live, changed)
        assert len(caught.value.faults) == 1


# --- objects that the live side lacks ---------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(1, 1)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(linear().parameters(), lr=0.1)


MORE: dict[str, tuple[Any, Any, str]] = {
    "list": ([linear()], [linear(), linear()], "[1]"),
    "deque": (deque([linear()]), deque([linear(), linear()]), "[1]"),
    "dict": ({"a": linear()}, {"a": linear(), "b": linear()}, "['b']"),
    "beside data": ({"a": linear(), "n": 1}, {"b": linear(), "a": linear(), "n": 1}, "['b']"),
    "optimizer": ({"a": linear(), "n": 1}, {"a": linear(), "n": 1, "o": optimizer()}, "['o']"),
    "pairs": ([(linear(), 1)], [(linear(), 1), (linear(), 2)], "[1]"),
    "objects": ([Counters()], [Counters(), Counters()], "[1]"),
    "pairs of objects": ([(Counters(), 1)], [(Counters(), 1), (Counters(), 1)], "[1]"),
}


@pytest.mark.parametrize("case", MORE)
def test_an_object_that_was_stored_and_isnt_live_is_refused_and_left_out_when_not_strict(
    case: str, tmp_path: Path
) -> None:
    live, saved, key = MORE[case]
    live = copy.deepcopy(live)
    length, path = len(live), f"state['pool']{key}"
    with pytest.raises(StateMismatch) as caught:
        apply_state({"pool": live}, through_disk(tmp_path, {"pool": saved}))
    assert caught.value.faults == (f"{path} is in the checkpoint, not in the live state",)
    report = apply_state({"pool": live}, through_disk(tmp_path, {"pool": saved}), strict=False)
    assert report.unused == [path]
    assert len(live) == length


def test_data_that_grew_beside_objects_is_data(tmp_path: Path) -> None:
    weights = OrderedDict(linear().state_dict())
    saved = {
        "a": {"m": linear(), "best": {"loss": 1.0}, "n": 1},
        "b": {"m": linear(), "history": [{"loss": 0.1}], "epoch": 3},
        "c": [{"n": 1}, {"best": linear().state_dict()}, {"best": weights}],
        "d": [{"best": weights}],
    }
    live: dict[str, Any] = {"a": {"m": linear(), "n": 1}, "b": {"m": linear()}, "c": [{"n": 0}], "d": []}
    apply_state(live, through_disk(tmp_path, saved))
    assert live["a"]["best"] == {"loss": 1.0}
    assert (live["b"]["history"], live["b"]["epoch"]) == ([{"loss": 0.1}], 3)
    assert same(dict(live["c"][2]["best"]), dict(weights))
    assert same(dict(live["d"][0]["best"]), dict(weights))
