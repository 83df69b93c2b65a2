"""Keys and elements that no file can hold, or that nothing would find again, are refused by key path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from round_trip import LAYOUT_IDS, LAYOUTS, Sharding, same, through_disk

DICTS = {
    "dict": dict, "odict": OrderedDict, "counter": Counter, "defaultdict": lambda items: defaultdict(int, items),
    "marked": lambda items: {"__ckptd__": 1, **dict(items)},
}  # fmt: skip


@pytest.mark.parametrize("kind", DICTS)
@pytest.mark.parametrize("key", [math.nan, (1, (math.nan,))], ids=str)
def test_a_nan_in_a_key_is_refused_by_key_path_with_what_to_do(kind: str, key: Any) -> None:
    with pytest.raises(UnstorableState) as caught:
        capture({"a": [DICTS[kind]([(key, 3)])]})
    assert caught.value.where == "state['a'][0]"
    assert "'nan'" in caught.value.todo


def test_a_nan_at_the_top_is_refused() -> None:
    with pytest.raises(UnstorableState):
        capture({math.nan: 3})


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_a_set_with_nan_comes_back_and_is_restored(sharding: Sharding, tmp_path: Path) -> None:
    made = {"s": {math.nan, 1, (math.nan, "x"), complex(math.nan, 1)}, "f": frozenset([math.nan, 2])}
    loaded = through_disk(tmp_path, made, sharding, rng=False)
    assert same(loaded, made)
    live: dict[str, Any] = {"s": {3}, "f": frozenset()}
    inside = live["s"]
    apply_state(live, loaded)
    assert same(live, made)
    assert live["s"] is inside


LONG = 10**5000  # of more digits than Python writes


@pytest.mark.parametrize(
    "value", [{LONG}, {(1, LONG)}, frozenset([LONG, 1]), {LONG: 1}, Counter({LONG: 1}), {(LONG,): object()}]
)
def test_an_integer_too_long_is_refused_by_key_path(value: Any) -> None:
    with pytest.raises(UnstorableState, match="integer too long") as caught:
        capture({"a": [value]})
    assert caught.value.where == "state['a'][0]"
    assert caught.value.todo == "store hex(value)"
    assert len(str(caught.value)) < 400


def nested(levels: int) -> Any:
    key: Any = 1
    for _ in range(levels):
        key = (key,)
    return key


@pytest.mark.parametrize("levels", [101, 500, 5000])
@pytest.mark.parametrize("make", [lambda key: {key: 1}, lambda key: {key}, lambda key: frozenset([key])])
def test_a_key_nested_too_deep_is_refused_by_key_path(levels: int, make: Any) -> None:
    with pytest.raises(UnstorableState) as caught:
        capture({"a": [make(nested(levels))]})
    assert caught.value.where == "state['a'][0]"


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", [{NoRepr(): 1}, {NoRepr()}, frozenset([NoRepr()])])
def test_a_key_that_cant_be_shown_is_refused_by_key_path(value: Any) -> None:
    with pytest.raises(UnstorableState, match="NoRepr") as caught:
        capture({"a": [value]})
    assert caught.value.where == "state['a'][0]"
