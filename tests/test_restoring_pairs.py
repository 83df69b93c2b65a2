"""Random live and stored states side by side: a restore gives exactly what was stored, or refuses and touches nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from round_trip import same

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint lacks .* removed:ckptd.CheckpointWarning")

KEYS = st.sampled_from(["a", "b", 1, "1", ""])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(width=16), st.text(max_size=2))
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from([(), (0,), (2,), (2, 2)]))
    tensor = torch.full(shape, draw(st.integers(0, 3))).to(draw(DTYPES))
    if len(shape) == 2 and draw(st.booleans()):
        return tensor.t()
    if shape == (2,) and draw(st.booleans()):
        return tensor[:1].expand(2)
    return tensor


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    model = nn.Sequential(
        *(nn.Linear(2, 2, bias=draw(st.booleans())) for _ in range(draw(st.integers(1, 2))))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(draw(st.integers(0, 3)))
    if len(model) == 2 and draw(st.booleans()):
        model[1].weight = model[0].weight
    return model


def arrays() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda n, kind: np.full(2, n, dtype=kind), st.integers(0, 3), st.sampled_from(["f4", "i8"])
    )


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        lists,
        lists.map(tuple),
        st.sets(st.integers(0, 3), max_size=2),
        st.lists(st.integers(0, 3), max_size=2).map(deque),
        st.binary(max_size=2).map(bytearray),
    )


VALUES = st.recursive(st.one_of(SCALARS, tensors(), arrays(), modules()), containers, max_leaves=6)
STATES = st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, min_size=1, max_size=3)


def stored_form(value: Any) -> Any:
    """What a checkpoint of value gives: modules as their state_dict."""
    if isinstance(value, nn.Module):
        return OrderedDict((name, item.clone()) for name, item in value.state_dict().items())
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: stored_form(item) for key, item in value.items()})
    if isinstance(value, dict):
        return type(value)((key, stored_form(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(stored_form(item) for item in value)
    return copy.deepcopy(value)


def contents(value: Any) -> Any:
    """value without the kind of its dicts, which is the live side's, and without a module's names."""
    if isinstance(value, nn.Module):
        return contents(stored_form(value))
    if isinstance(value, Mapping):
        return {key: contents(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(contents(item) for item in value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def changed(value: Any, draw: Any) -> Any:
    """A copy of value with some of its leaves, and sometimes a whole branch, another."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(VALUES)
    if isinstance(value, torch.Tensor):
        return draw(tensors()) if kind < 4 else torch.full_like(value, draw(st.integers(0, 3)))
    if isinstance(value, nn.Module):
        twin = copy.deepcopy(value)
        for tensor in twin.parameters():
            tensor.data.fill_(draw(st.integers(0, 3)))
        return twin
    if isinstance(value, dict):
        items = {key: changed(value[key], draw) for key in draw(st.permutations(list(value)))}
        return defaultdict(list, items) if isinstance(value, defaultdict) else type(value)(items)
    if isinstance(value, (list, tuple)):
        return type(value)(changed(item, draw) for item in value)
    return draw(SCALARS) if type(value) in (int, float, str, bool, type(None)) else copy.deepcopy(value)


def check(live: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Restore stored into live and prove what came of it; whether it was restored."""
    before, wanted = contents(live), contents(stored)
    rng = torch.get_rng_state()
    try:
        apply_state(live, stored, only=sorted({*live, *stored}))
    except StateMismatch as error:
        assert error.faults
        assert same(contents(live), before)
        restored = False
    else:
        # The order of the components is the script's own.
        assert same({name: contents(live[name]) for name in wanted}, wanted)
        assert live.keys() == wanted.keys()
        restored = True
    assert torch.equal(torch.get_rng_state(), rng)
    return restored


@settings(max_examples=250, deadline=None)
@given(STATES, STATES)
def test_any_two_states_are_restored_exactly_or_refused_untouched(live: Any, other: Any) -> None:
    check(live, stored_form(other))


@settings(max_examples=250, deadline=None)
@given(STATES, st.data())
def test_a_state_that_differs_a_little_is_restored_exactly_or_refused_untouched(live: Any, data: Any) -> None:
    check(live, {name: stored_form(changed(value, data.draw)) for name, value in live.items()})


@settings(max_examples=150, deadline=None)
@given(STATES)
def test_every_state_takes_its_own_values_back(state: Any) -> None:
    stored = stored_form(state)
    for value in state.values():
        _spoil(value)
    check(state, stored)


def _spoil(value: Any) -> None:
    if isinstance(value, nn.Module):
        for parameter in value.parameters():
            parameter.data.fill_(9)
    elif isinstance(value, torch.Tensor) and value.is_contiguous():
        value.fill_(9)
    elif isinstance(value, dict):
        for item in value.values():
            _spoil(item)
    elif isinstance(value, list):
        for item in value:
            _spoil(item)
