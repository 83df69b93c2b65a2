"""Any state comes back in value, type and ties, by load and by restore, or is refused by key path."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptd
from any_state import SHARDINGS, Data, Drawn, Frozen, otherwise, states, ties_in
from ckptd.errors import UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")]

#: How many states to try in a search that isn't the same at every run; unset, the same 150 are tried each time.
EXAMPLES = os.environ.get("CKPTD_ANY_STATE_EXAMPLES")
THOROUGH = settings(
    max_examples=int(EXAMPLES or 150), derandomize=EXAMPLES is None, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def stored(folder: str, state: dict[str, Any], sharding: ckptd.Sharding) -> dict[str, Any] | None:
    """state as it comes back from a file; None when it was refused as it should be."""
    try:
        return through_disk(Path(folder), state, sharding, rng=False)
    except UnstorableState as error:
        assert error.where.startswith("state[") and error.todo
        assert holds_what_no_file_can(state)
        return None


@THOROUGH
@given(drawn=states, sharding=st.sampled_from(SHARDINGS))
def test_any_state_comes_back_by_load_with_its_ties(drawn: Drawn, sharding: ckptd.Sharding) -> None:
    state = drawn.state
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        loaded = stored(folder, state, sharding)
    if loaded is None:
        return
    assert same(loaded, state)
    assert ties_in(list(loaded.values())) == ties_in(list(state.values()))  # across components too


@THOROUGH
@given(drawn=states, sharding=st.sampled_from(SHARDINGS))
def test_any_live_state_of_the_same_structure_is_restored_to_it(
    drawn: Drawn, sharding: ckptd.Sharding
) -> None:
    state = drawn.state
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        loaded = stored(folder, state, sharding)
    if loaded is None:
        return
    live = otherwise(state)
    ties = ties_in(live, deques=False)  # what lies in a deque is replaced
    report = apply_state(live, loaded)
    assert (report.missing, report.unused) == (["state['rng']"], [])
    assert same(live, state)
    assert ties_in(live, deques=False) == ties


@THOROUGH
@given(drawn=states)
def test_any_state_takes_no_more_memory_than_what_it_shows(drawn: Drawn) -> None:
    state = drawn.state
    try:
        captured = capture(state, rng=False)
    except UnstorableState:
        return
    shown = sum(row.nbytes + 64 for row in captured.tensors if row.alias_of is None)
    assert captured.data_bytes <= shown
    assert len(captured.sources) == sum(row.alias_of is None for row in captured.tensors)


def has_nan(key: Any) -> bool:
    return any(map(has_nan, key)) if isinstance(key, tuple) else key != key


def holds_what_no_file_can(value: Any) -> bool:
    """A string that isn't Unicode, an integer of more than 255 bytes, a NaN in a key, an array of no bytes an item."""
    if isinstance(value, (np.generic, np.ndarray)):
        return isinstance(value, np.ndarray) and not value.dtype.itemsize
    if isinstance(value, str):
        return any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, int):
        return value.bit_length() > 2000
    if isinstance(value, dict):
        extra = getattr(value, "_metadata", None)
        return any(map(has_nan, value)) or any(map(holds_what_no_file_can, [*value, *value.values(), extra]))
    if isinstance(value, (Data, Frozen)):
        return any(holds_what_no_file_can(getattr(value, name)) for name in value.__match_args__)
    return isinstance(value, (list, tuple, set, frozenset, deque)) and any(map(holds_what_no_file_can, value))
