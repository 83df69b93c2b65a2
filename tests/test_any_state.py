"""Any plain state comes back in value and type, or is refused by key path."""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.errors import UnstorableState
from round_trip import LAYOUTS, same, through_disk

text = st.text(max_size=8) | st.sampled_from(
    ["__ckptd__", "tensor", "items", "file", "key", "[", "rng", "\ud800"]
)
keys = st.recursive(
    text | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.none() | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary(max_size=9)
)
tensors = st.builds(
    lambda dtype, shape, fill: torch.full(shape, fill, dtype=dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.uint16, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1),
)
arrays = st.builds(
    lambda dtype, shape, fill: np.full(shape, fill, dtype=dtype),
    st.sampled_from(["f8", ">i4", "u1", "?", "c16", "U3", "S2"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1),
)
sets = st.sets(keys, max_size=4)


def containers(inner: Any) -> Any:
    items = st.lists(st.tuples(keys, inner), max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | items.map(dict)
        | items.map(OrderedDict)
        | st.lists(inner, max_size=4).map(deque)
        | sets
        | sets.map(frozenset)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.lists(st.floats(), min_size=64, max_size=70)
    )


values = st.recursive(scalars | tensors | arrays, containers, max_leaves=12)
storable_names = text.filter(lambda name: name not in ("__ckptd__", "rng"))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(state=st.dictionaries(storable_names, values, max_size=4), layout=st.sampled_from(LAYOUTS))
def test_any_plain_state_comes_back_or_is_refused_by_key_path(state: dict[str, Any], layout: Any) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            loaded = through_disk(Path(folder), state, layout, rng=False)
        except UnstorableState as error:
            assert error.where.startswith("state")
            assert "\ud800" in repr(state) or "\\ud800" in repr(state) or any_long_int(state)
            return
    assert same(loaded, state)


def any_long_int(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() > 2000
    if isinstance(value, dict):
        return any(map(any_long_int, [*value, *value.values()]))
    return isinstance(value, (list, tuple, set, frozenset, deque)) and any(map(any_long_int, value))
