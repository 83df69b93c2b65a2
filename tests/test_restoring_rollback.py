"""A restore in a process that has trained on: what came since goes again, and nothing of it refuses the restore."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ckptd.Client]:
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        yield client


def weights(value: float) -> dict[str, Any]:
    return {"w": torch.full((2,), value), "b": torch.full((1,), value)}


GROWN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "dict of metrics": ({"1": 0.5}, lambda v: v.update({"2": 0.3})),
    "dict of lists": ({"loss": [1.0]}, lambda v: v.update(acc=[1.0])),
    "dict of tensors": ({"1": torch.ones(2)}, lambda v: v.update({"2": torch.ones(2)})),
    "dict of arrays": ({"1": [np.ones(2)]}, lambda v: v.update({"2": [np.ones(2)]})),
    "defaultdict": (defaultdict(float), lambda v: v.update(x=1.0)),
    "Counter": (Counter("a"), lambda v: v.update("ab")),
    "list of tensors": ([torch.ones(1)], lambda v: v.append(torch.zeros(1))),
    "list of records": ([{"loss": torch.ones(1)}], lambda v: v.append({"loss": torch.ones(1)})),
    "deque of tensors": (deque([torch.ones(1)], maxlen=2), lambda v: v.extend([torch.zeros(2)] * 3)),
    "tuple of tensors": ((torch.ones(1),), lambda v: (*v, torch.ones(1))),
    "None to number": (None, lambda v: 0.3),
    "None to tensor": (None, lambda v: torch.ones(2)),
    "None to state_dict": (None, lambda v: weights(1.0)),
    "None to a module's state_dict": (None, lambda v: nn.Linear(2, 2).state_dict()),
    "tensor to None": (torch.ones(2), lambda v: None),
    "number to tensor": (float("inf"), lambda v: torch.tensor(0.5)),
    "number to array": (0.0, lambda v: np.array(0.5)),
    "number to record": (0.0, lambda v: {"loss": 0.5}),
    "longer tensor": (torch.ones(2), lambda v: torch.ones(3)),
    "longer array": (np.ones(2), lambda v: np.ones(3)),
    "another dtype": (torch.zeros(1, dtype=torch.int64), lambda v: v + 0.5),
    "another kind of dict": ({"a": 1}, lambda v: OrderedDict(b=1)),
    "text to bytes": ("a", lambda v: b"a"),
}


@pytest.mark.parametrize("case", GROWN)
def test_what_training_made_since_the_snapshot_is_gone_after_the_restore(
    case: str, client: ckptd.Client
) -> None:
    value, grow = GROWN[case]
    state = {"v": copy.deepcopy(value), "deep": {"v": copy.deepcopy(value)}}
    client.snapshot(1, state)
    for holder in (state, state["deep"]):
        changed = grow(holder["v"])
        holder["v"] = holder["v"] if changed is None and value is not None else changed  # in place, or anew
    if case == "tensor to None":
        state["v"] = state["deep"]["v"] = None
    assert not same(state, {"v": value, "deep": {"v": value}})
    client.restore(state)
    assert same(state, {"v": value, "deep": {"v": value}})


def test_what_can_be_restored_in_place_keeps_its_identity_in_a_rollback(client: ckptd.Client) -> None:
    first, weight, record = torch.ones(1), torch.ones(2), {"n": 1}
    state: dict[str, Any] = {"losses": [first], "best": {"w": weight}, "records": [record]}
    held = [state["losses"], state["best"], state["records"], first, weight, record]
    client.snapshot(1, state)
    first.zero_(), weight.zero_(), record.update(n=2, more=3)
    state["losses"].append(torch.ones(1)), state["records"].append({"n": 3}), state["best"].update(b=weight)
    client.restore(state)
    now = [state["losses"], state["best"], state["records"], state["losses"][0], state["best"]["w"]]
    assert all(one is before for one, before in zip([*now, state["records"][0]], held, strict=True))
    assert same(state, {"losses": [torch.ones(1)], "best": {"w": torch.ones(2)}, "records": [{"n": 1}]})


def test_a_rollback_says_which_entries_it_removed(client: ckptd.Client) -> None:
    state: dict[str, Any] = {"seen": {"a": 1}, "buffers": {"x": torch.ones(1)}}
    client.snapshot(1, state)
    state["seen"]["b"] = state["buffers"]["y"] = torch.ones(1)
    resumed = client.restore(state)
    assert resumed is not None
    assert resumed.dropped == ("state['seen']['b']", "state['buffers']['y']")
    assert resumed.missing == ()


def test_objects_are_compared_in_a_rollback_too_and_nothing_is_touched(client: ckptd.Client) -> None:
    state: dict[str, Any] = {"pool": {"a": nn.Linear(1, 1)}, "n": {"x": 1}, "members": [torch.Generator()]}
    client.snapshot(1, state)
    state["n"]["y"] = 2
    state["pool"]["b"] = nn.Linear(1, 1)
    state["members"].append(torch.Generator())
    with pytest.raises(StateMismatch) as caught:
        client.restore(state)
    assert caught.value.faults == (
        "state['pool']['b'] is not in the checkpoint",
        "state['members'][1] is not in the checkpoint",
    )
    assert state["n"] == {"x": 1, "y": 2}


# --- a process that doesn't know the checkpoint -----------------------------------------------------


def saved(root: Path, *states: dict[str, Any]) -> None:
    with ckptd.Client(root, daemon="off") as client:
        for step, state in enumerate(states, 1):
            client.snapshot(step, state)


def test_a_tensor_that_only_a_new_script_has_is_refused_by_name_with_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, {"buffers": {"x": torch.ones(1)}})
    live: dict[str, Any] = {"buffers": {"x": torch.zeros(1), "new": torch.zeros(1)}}
    with ckptd.Client(tmp_path, daemon="off") as client:
        with pytest.raises(StateMismatch, match=r"\['buffers'\]\['new'\] is not .*strict=False keeps it"):
            client.restore(live)
        assert same(live["buffers"]["x"], torch.zeros(1))
        resumed = client.restore(live, strict=False)
        assert resumed is not None and resumed.missing == ("state['buffers']['new']",)
        # Nor does that restore make the tensor one that training has made.
        with pytest.raises(StateMismatch, match=r"\['new'\] is not in the checkpoint"):
            client.restore(live)
        client.snapshot(2, live)
        with pytest.raises(StateMismatch, match=r"\['new'\] is not in the checkpoint"):
            client.restore(live, step=1)
        client.restore(live, step=2)


def test_an_entry_of_data_that_only_the_live_dict_has_is_removed_with_a_warning(tmp_path: Path) -> None:
    saved(tmp_path, {"todo": {"b": 1}})
    live = {"todo": {"a": 1, "b": 2}}
    with ckptd.Client(tmp_path, daemon="off") as client:
        with pytest.warns(ckptd.CheckpointWarning, match=r"lacks state\['todo'\]\['a'\]: removed"):
            resumed = client.restore(live)
        assert live == {"todo": {"b": 1}}
        assert resumed is not None and resumed.dropped == ("state['todo']['a']",)
        live["todo"]["c"] = 3
        client.restore(live)  # from now on it is known
    assert live == {"todo": {"b": 1}}


def test_a_restored_checkpoint_is_known_and_one_before_it_is_not(tmp_path: Path) -> None:
    saved(tmp_path, {"m": {"1": torch.ones(1)}}, {"m": {"1": torch.ones(1)}})
    live: dict[str, Any] = {"m": {"1": torch.zeros(1)}}
    with ckptd.Client(tmp_path, daemon="off") as client:
        client.restore(live)
        live["m"]["2"] = torch.ones(1)
        with pytest.raises(StateMismatch, match="is not in the checkpoint"):
            client.restore(live, step=1)
        client.restore(live, step=2)
        assert same(live, {"m": {"1": torch.ones(1)}})


def test_a_later_checkpoint_of_an_older_script_is_no_rollback(tmp_path: Path) -> None:
    saved(tmp_path, *({"m": {"1": torch.ones(1)}} for _ in range(5)))
    live: dict[str, Any] = {"m": {"1": torch.zeros(1), "new": torch.ones(1)}}
    with ckptd.Client(tmp_path, daemon="off") as client:
        client.restore(live, step=1, strict=False)
        client.snapshot(2, live)
        with pytest.raises(StateMismatch, match=r"\['new'\] is not in the checkpoint"):
            client.restore(live, step=5)
        assert set(live["m"]) == {"1", "new"}


def test_what_this_client_made_is_known_and_what_it_restored_in_part_is_not(tmp_path: Path) -> None:
    saved(tmp_path, {"m": {"1": torch.ones(1)}, "n": 1})
    live: dict[str, Any] = {"m": {"1": torch.zeros(1)}, "n": 0}
    with ckptd.Client(tmp_path, daemon="off") as client:
        client.restore(live, only=["m"])
        live["m"]["2"] = torch.ones(1)
        with pytest.raises(StateMismatch, match="is not in the checkpoint"):
            client.restore(live)
        client.snapshot(2, live)
        live["m"]["3"] = torch.ones(1)
        client.restore(live)
        assert set(live["m"]) == {"1", "2"}


def test_a_checkpoint_of_another_run_is_never_a_rollback(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "other", {"m": {"1": torch.ones(1)}}, step=5)
    live: dict[str, Any] = {"m": {"1": torch.zeros(1), "2": torch.zeros(1)}}
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        client.snapshot(1, live)
        with pytest.raises(StateMismatch, match="is not in the checkpoint"):
            client.restore(live, source=path)


@pytest.mark.parametrize(
    ("live", "stored"),
    [
        ([torch.zeros(1)] * 2, [torch.ones(1), torch.ones(1), torch.ones(2)]),
        ([torch.zeros(1), torch.zeros(3), None], [torch.ones(1), torch.ones(2)]),
        ([torch.zeros(1), {"a": torch.zeros(1)}], [{"b": torch.ones(1)}]),
        (deque([np.zeros(2), np.zeros(2)]), deque([np.ones(3)])),
        ([torch.zeros(1)], []),
    ],
)
def test_a_list_of_data_of_another_length_follows_the_checkpoint(
    live: Any, stored: Any, tmp_path: Path
) -> None:
    state = {"x": live}
    apply_state(state, through_disk(tmp_path, {"x": stored}))
    assert state["x"] is live
    assert same(live, stored)


def test_a_list_of_data_of_the_same_length_is_compared(tmp_path: Path) -> None:
    live = [torch.zeros(2), torch.zeros(2)]
    with pytest.raises(StateMismatch, match=r"\['x'\]\[1\] has shape \[3\], live \[2\]"):
        apply_state({"x": live}, through_disk(tmp_path, {"x": [torch.ones(2), torch.ones(3)]}))
    assert same(live, [torch.zeros(2), torch.zeros(2)])


# --- a number for a tensor --------------------------------------------------------------------------


TAKEN: dict[str, tuple[Any, Any]] = {
    "float": (torch.tensor(float("inf")), 0.25),
    "float, one dimension": (torch.zeros(1), 0.25),
    "float, NumPy's": (torch.zeros(()), np.float32(0.3)),
    "NaN": (torch.zeros(()), float("nan")),
    "minus nought": (torch.zeros(()), -0.0),
    "int into float": (torch.zeros(()), 3),
    "bool": (torch.tensor(True), False),
    "int": (torch.zeros((), dtype=torch.int64), 2**62),
    "complex": (torch.zeros((), dtype=torch.complex64), 1j),
    "array": (np.array(np.inf), 0.3),
    "array of ints": (np.zeros(1, "i4"), 7),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_live_tensor_of_one_element_takes_a_number_in_place(case: str) -> None:
    live, number = copy.deepcopy(TAKEN[case])
    state = {"best": live}
    apply_state(state, {"best": number}, only=["best"])
    assert state["best"] is live
    assert repr(live.item()) == repr(type(live.item())(number))


NOT_HELD: dict[str, tuple[Any, Any, str]] = {
    "double into single": (torch.zeros(()), 0.3, "float 0.3 in the checkpoint, which torch.float32"),
    "fraction into int": (torch.zeros((), dtype=torch.int64), 0.5, "which torch.int64"),
    "minus nought into int": (torch.zeros((), dtype=torch.int64), -0.0, "which torch.int64"),
    "too large": (torch.zeros((), dtype=torch.uint8), 300, "int 300 in the checkpoint, which torch.uint8"),
    "two into bool": (torch.tensor(True), 2, "which torch.bool"),
    "complex into float": (torch.zeros(()), 1j, "which torch.float32"),
    "array, complex into float": (np.zeros(1), 1j, "which float64"),
    "array, double into single": (np.zeros(1, "f4"), 0.3, "which float32"),
    "array, too large": (np.zeros(1, "u1"), 300, "which uint8"),
    "array of text": (np.zeros(1, "U3"), 3, "which <U3"),
}


@pytest.mark.parametrize("case", NOT_HELD)
def test_a_number_that_the_dtype_cant_hold_is_refused_by_both(case: str) -> None:
    live, number, fault = copy.deepcopy(NOT_HELD[case])
    state = {"best": live}
    with pytest.raises(StateMismatch, match=fault):
        apply_state(state, {"best": number}, only=["best"])
    assert state["best"] is live
    assert same(live, NOT_HELD[case][0])


def test_not_strict_converts_a_number_and_a_dtype() -> None:
    state: dict[str, Any] = {"best": (best := torch.zeros(())), "count": torch.zeros(1, dtype=torch.int64)}
    apply_state(state, {"best": 0.3, "count": torch.full((1,), 2.5)}, only=list(state), strict=False)
    assert state["best"] is best and same(best, torch.tensor(0.3))
    assert same(state["count"], torch.full((1,), 2.5))


# --- data that shares its tensors -------------------------------------------------------------------


def test_a_kept_copy_that_is_the_models_own_tensors_gets_its_own(tmp_path: Path) -> None:
    source = nn.Linear(2, 2)
    best = {name: value + 1 for name, value in source.state_dict().items()}
    best["bias"] = source.bias.detach().clone()  # equal for now, and not tied
    live = nn.Linear(2, 2)
    state: dict[str, Any] = {"best": live.state_dict(), "model": live}
    weight = live.weight
    apply_state(state, through_disk(tmp_path, {"best": best, "model": source}))
    assert live.weight is weight and same(weight.detach(), source.weight.detach())
    assert same(dict(state["best"]), best)
    with torch.no_grad():
        live.bias.fill_(9)
    assert same(dict(state["best"]), best)


def test_a_kept_tensor_that_is_tied_in_the_checkpoint_stays_tied(tmp_path: Path) -> None:
    source, live = nn.Linear(2, 2), nn.Linear(2, 2)
    state: dict[str, Any] = {"kept": [held := live.weight.detach()], "model": live}
    apply_state(
        state, through_disk(tmp_path, {"kept": [source.weight.detach()], "model": source}), rollback=True
    )
    assert state["kept"][0] is held
    assert held.data_ptr() == live.weight.data_ptr() and same(held, source.weight.detach())


def test_one_tensor_many_times_in_a_list_becomes_as_many_as_were_stored(tmp_path: Path) -> None:
    zeros = torch.zeros(2)
    state: dict[str, Any] = {"sums": [zeros] * 4, "pair": (zeros, zeros)}
    tied = torch.ones(2)
    stored = {"sums": [first := torch.zeros(2), tied, tied, torch.ones(2)], "pair": (tied * 2, first)}
    apply_state(state, through_disk(tmp_path, stored))
    assert same(state, stored)
    sums = state["sums"]
    assert sums[0] is zeros is state["pair"][1]
    assert sums[1].data_ptr() == sums[2].data_ptr()
    assert len({one.data_ptr() for one in (*sums, *state["pair"])}) == 4


def test_tied_parameters_of_two_modules_are_refused_still(tmp_path: Path) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    loaded = through_disk(tmp_path, {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "kept": [torch.ones(2, 2)]})
    before = one.weight.detach().clone()
    state = {"a": one, "b": other, "kept": [one.weight.detach()]}
    with pytest.raises(StateMismatch) as caught:
        apply_state(state, loaded)
    assert all("['weight'] shares its memory" in fault for fault in caught.value.faults)
    assert same(one.weight.detach(), before)


# --- any state --------------------------------------------------------------------------------------

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(width=16), st.text(max_size=2))
TENSORS = st.builds(
    lambda shape, value, dtype: torch.full(shape, value).to(dtype),
    st.sampled_from([(), (1,), (2,), (2, 2)]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16]),
)
ARRAYS = st.builds(lambda n, kind: np.full(n, n, kind), st.integers(0, 2), st.sampled_from(["f4", "i8"]))
KEYS = st.sampled_from(["a", "b", "c", 1])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts, lists = st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        st.dictionaries(KEYS, st.integers(0, 3)).map(Counter),
        lists,
        lists.map(tuple),
        lists.map(lambda items: deque(items, maxlen=4)),
        st.sets(st.integers(0, 3), max_size=2),
    )


VALUES = st.recursive(st.one_of(SCALARS, TENSORS, ARRAYS), containers, max_leaves=8)
STATES = st.dictionaries(st.sampled_from(["x", "y"]), st.dictionaries(KEYS, VALUES, max_size=3), min_size=1)


def train_on(value: Any, draw: Callable[[Any], Any], pool: list[Any]) -> Any:
    """value as a training run might have left it: grown, changed in place, made anew, or another's."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(VALUES)
    if kind == 1 and pool:
        return draw(st.sampled_from(pool))  # best = last
    pool.append(value)
    if isinstance(value, torch.Tensor):
        return value.fill_(1) if kind < 6 else value + 0.5
    if isinstance(value, np.ndarray):
        value[...] = 1
    elif isinstance(value, set):
        value.add(9)
    elif isinstance(value, dict):
        _train_dict(value, draw, pool)
    elif isinstance(value, (list, deque)):
        items = [train_on(item, draw, pool) for item in value]
        value.clear()
        value.extend(items[draw(st.integers(0, 1)) :] + draw(st.lists(VALUES, max_size=2)))
    elif isinstance(value, tuple):
        return tuple(train_on(item, draw, pool) for item in value)
    return value


def _train_dict(value: dict[Any, Any], draw: Callable[[Any], Any], pool: list[Any]) -> None:
    numbers = isinstance(value, Counter)
    for key in list(value):
        value[key] = draw(st.integers(0, 3)) if numbers else train_on(value[key], draw, pool)
    for key in draw(st.lists(KEYS, max_size=2)):
        value[key] = draw(st.integers(0, 3)) if numbers else draw(VALUES)
    if value and draw(st.booleans()):
        del value[next(iter(value))]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STATES, st.data())
def test_any_state_of_data_comes_back_whatever_training_did_to_it(
    tmp_path: Path, state: Any, data: Any
) -> None:
    wanted = copy.deepcopy(state)
    loaded = through_disk(tmp_path, state)
    model = nn.Linear(1, 1)
    pool: list[Any] = [model.weight.detach()]
    for name in state:
        for key in list(state[name]):
            state[name][key] = train_on(state[name][key], data.draw, pool)
        if data.draw(st.booleans()):
            state[name]["new"] = data.draw(VALUES)
    apply_state(state, loaded, rollback=True)
    assert same(state, wanted)
