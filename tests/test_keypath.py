"""Key paths: two spellings, both exact."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import CorruptCheckpoint
from ckptd.snapshot import keypath

SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.binary(),
)
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


def exact(value: Any) -> Any:
    """value so that == also tells types, signs of zero and NaNs apart."""
    if isinstance(value, tuple):
        return ("tuple", [exact(part) for part in value])
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else value.hex())
    return (type(value).__name__, value)


@given(st.lists(KEYS).map(tuple))
def test_a_path_comes_back_from_json_text_in_value_and_type(path: tuple[Any, ...]) -> None:
    text = json.dumps(keypath.to_json(path), allow_nan=False)
    assert exact(keypath.from_json(json.loads(text))) == exact(path)


def test_keys_that_python_calls_equal_have_different_json() -> None:
    spelled = {json.dumps(keypath.to_json((key,))) for key in (1, True, 1.0, "1", b"1", (1,))}
    assert len(spelled) == 6


def test_a_path_reads_like_python() -> None:
    assert keypath.show(("model", "h.0.weight", 3)) == "state['model']['h.0.weight'][3]"
    assert keypath.show(()) == "state"
    assert len(keypath.show(("x" * 100_000,))) < 1000


@pytest.mark.parametrize(
    "value",
    [
        {}, "a", [1.5], [None], [{}], [{"bool": 1}], [{"none": 0}], [{"float": "1.5"}], [{"float": "nope"}],
        [{"bytes": "AB"}], [{"bytes": "0"}], [{"tuple": {}}], [{"a": 1, "b": 2}],
        [{"bool": True, "none": None}], [True],
        [["a"]], [{"float": "0x1p99999"}],
    ],
)  # fmt: skip
def test_what_to_json_never_writes_is_refused(value: object) -> None:
    with pytest.raises(CorruptCheckpoint):
        keypath.from_json(value)


def test_only_plain_keys_are_keys() -> None:
    assert keypath.is_key((1, ("a", None), b"x"))
    assert not keypath.is_key([1])
    assert not keypath.is_key((1, [2]))
    assert not keypath.is_key(1j)


def test_whatever_has_no_repr_is_shown_too() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert keypath.show((10**5000,)).startswith("state[0x31e2")
    assert "Shy" in keypath.show((Shy(),))
    assert len(keypath.show((10**50000,))) < 1000


def test_of_a_long_path_both_ends_are_shown() -> None:
    assert keypath.show_ends(tuple(range(10))) == "state[0][1][2][3]…(2 more)…[6][7][8][9]"
    assert keypath.show_ends(tuple(range(8))) == keypath.show(range(8))


def test_a_key_is_nested_as_deep_as_a_state_at_most() -> None:
    key: Any = 1
    for _ in range(100):
        key = (key,)
    assert keypath.is_key(key)
    assert not keypath.is_key((key,))
