"""What the state of a parameter may be: dtypes, plain numbers, own keys, shared memory; and what is refused."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_optim import Net, by_name, trained

Pair = namedtuple("Pair", ["first", "second"])


class Own(torch.optim.Optimizer):
    """Keeps whatever a test gives it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})


def one(**state: Any) -> tuple[nn.Parameter, Own]:
    parameter = nn.Parameter(torch.arange(4.0))
    optimizer = Own([parameter])
    if state:
        optimizer.state[parameter] = state
    return parameter, optimizer


def again(optimizer: Own, folder: Path, live: tuple[nn.Parameter, Own] | None = None) -> tuple[Any, Own]:
    parameter, fresh = live or one()
    apply_state({"optimizer": fresh}, through_disk(folder, {"optimizer": optimizer}))
    return fresh.state.get(parameter), fresh


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("stepped", [False, True])
def test_moments_keep_the_dtype_they_had_whatever_the_parameters_is(
    weights: torch.dtype, moments: torch.dtype, stepped: bool, tmp_path: Path
) -> None:
    def build(fill: float) -> tuple[nn.Parameter, Own]:
        parameter = nn.Parameter(torch.ones(3, dtype=weights))
        optimizer = Own([parameter])
        if fill:
            optimizer.state[parameter] = {"m": torch.full((3,), fill), "v": torch.full((3,), fill)}
        return parameter, optimizer

    parameter, optimizer = build(2.7182818)
    optimizer.state[parameter]["m"] = optimizer.state[parameter]["m"].to(moments)
    found, _ = again(optimizer, tmp_path, build(9.0 if stepped else 0))
    assert same(found, optimizer.state[parameter])


PLAIN: dict[str, Any] = {
    "an int step": 7,
    "a float": 0.1,
    "a bool": True,
    "None": None,
    "a string": "warm",
    "a 0-dim tensor": torch.tensor(3.0),
    "an int tensor": torch.tensor(3),
    "an empty tensor": torch.empty(0, 3),
    "a list of tensors": [torch.ones(2), torch.zeros(3), None],
    "an empty list": [],
    "a tuple": (torch.ones(1), 2),
    "a named tuple": Pair(torch.ones(1), 2),
    "a deque": deque([torch.ones(1), torch.zeros(1)], maxlen=4),
    "an OrderedDict": OrderedDict(b=torch.ones(1), a=1),
    "a defaultdict": defaultdict(list, {"x": [torch.ones(2)]}),
    "nested": {"deep": [{"er": (torch.ones(2, 2).t(), {"n": 1})}]},
    "a set": {1, 2},
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_value_of_any_plain_kind_comes_back_as_it_is(kind: str, stepped: bool, tmp_path: Path) -> None:
    parameter, optimizer = one(value=PLAIN[kind])
    found, _ = again(optimizer, tmp_path, one(value=PLAIN[kind], other=1) if stepped else None)
    assert same(found, optimizer.state[parameter])


def test_state_that_is_no_dict_and_state_that_is_empty_come_back(tmp_path: Path) -> None:
    parameter, optimizer = one()
    optimizer.state[parameter] = torch.ones(3)  # type: ignore[assignment]
    assert same(again(optimizer, tmp_path)[0], torch.ones(3))
    optimizer.state[parameter] = {}
    assert again(optimizer, tmp_path)[0] == {}


def test_keys_of_the_optimizers_own_come_back_in_place_and_others_go(tmp_path: Path) -> None:
    _, optimizer = one(m=torch.ones(2))
    optimizer.state["history"] = {"losses": torch.arange(3.0)}  # type: ignore[index]
    optimizer.state[1000] = {"n": 1}  # type: ignore[index]
    live = one(m=torch.zeros(2))
    held = torch.zeros(3)
    live[1].state["history"] = {"losses": held}  # type: ignore[index]
    live[1].state["later"] = {"n": 2}  # type: ignore[index]
    orphan = torch.ones(1)
    live[1].state[orphan] = {"n": 3}
    _, fresh = again(optimizer, tmp_path, live)
    assert list(fresh.state) == [live[0], "history", 1000]
    assert fresh.state["history"]["losses"] is held  # type: ignore[index]
    assert same(held, torch.arange(3.0))


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "RAdam", "NAdam", "Adagrad", "Rprop", "Adafactor", "RMSprop"]
)
def test_the_int_step_of_an_older_torch_becomes_what_this_one_works_with(kind: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = getattr(torch.optim, kind)(model.parameters())
    trained(model, optimizer)
    saved = deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    other = Net()
    fresh = getattr(torch.optim, kind)(other.parameters())
    apply_state({"m": other, "o": fresh}, {"m": model.state_dict(), "o": saved}, only=["m", "o"])
    assert all(isinstance(state["step"], torch.Tensor) for state in fresh.state.values())
    for parameter in model.parameters():
        optimizer.state[parameter]["step"] = torch.tensor(float(optimizer.state[parameter]["step"]))
    trained(model, optimizer)
    trained(other, fresh)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_two_keys_that_are_one_tensor_are_one_again(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    _, optimizer = one(m=shared, copy=shared, v=torch.ones(4))
    for live in (one(), one(m=torch.zeros(4), copy=torch.zeros(4), v=torch.zeros(4))):
        found, _ = again(optimizer, tmp_path, live)
        assert found["m"].data_ptr() == found["copy"].data_ptr()
        assert same(found["copy"], torch.arange(4.0))
        assert same(found["v"], torch.ones(4))


def test_two_stored_tensors_dont_meet_in_one_live_memory(tmp_path: Path) -> None:
    _, optimizer = one(m=torch.ones(4), v=torch.zeros(4))
    flat = torch.full((6,), 9.0)
    for live in (one(m=flat[:4], v=flat[:4]), one(m=flat[:4], v=flat[2:])):
        found, _ = again(optimizer, tmp_path, live)
        assert same(found, {"m": torch.ones(4), "v": torch.zeros(4)})


def test_moments_in_one_flat_buffer_are_written_into_it(tmp_path: Path) -> None:
    _, optimizer = one(m=torch.ones(4), v=torch.full((4,), 2.0))
    flat = torch.zeros(8)
    again(optimizer, tmp_path, one(m=flat[:4], v=flat[4:]))
    assert flat.tolist() == [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize(
    "live", ["expanded", "graph", "inference", "requires grad", "other stride", "the parameter"]
)
def test_a_live_tensor_that_cant_take_the_value_is_replaced(live: str, tmp_path: Path) -> None:
    _, optimizer = one(m=torch.arange(4.0))
    parameter, fresh = one()
    with torch.inference_mode():
        frozen = torch.zeros(4)
    before = {
        "expanded": torch.zeros(1).expand(4),
        "graph": torch.zeros(4, requires_grad=True) * 1,
        "inference": frozen,
        "requires grad": torch.zeros(4, requires_grad=True),
        "other stride": torch.zeros(8)[::2],
        "the parameter": parameter.detach(),
    }[live]
    fresh.state[parameter] = {"m": before}
    found, _ = again(optimizer, tmp_path, (parameter, fresh))
    assert found["m"] is not before
    assert same(found["m"], torch.arange(4.0))
    assert same(parameter.detach(), torch.arange(4.0))


def test_a_leaf_that_learns_isnt_written_into_what_hangs_on_a_graph(tmp_path: Path) -> None:
    _, optimizer = one(m=torch.arange(4.0).requires_grad_())
    parameter, live = one(m=torch.zeros(4, requires_grad=True) * 1)
    found, _ = again(optimizer, tmp_path, (parameter, live))
    assert same(found["m"], torch.arange(4.0).requires_grad_())
    assert found["m"].is_leaf


@pytest.mark.parametrize("as_it_is", [True, False])
def test_a_master_weight_that_is_the_parameter_is_it_again(as_it_is: bool, tmp_path: Path) -> None:
    """`p.float()` gives p itself where p is fp32 already."""
    parameter, optimizer = one(n=1)
    optimizer.state[parameter]["master"] = parameter if as_it_is else parameter.detach()
    stepped = one(master=torch.zeros(4))
    for fresh in (one(), stepped):
        fresh[0].data.fill_(5.0)
        found, _ = again(optimizer, tmp_path, fresh)
        assert found["master"].data_ptr() == fresh[0].data_ptr()
        assert (found["master"] is fresh[0]) is as_it_is
        assert fresh[0].tolist() == [5.0] * 4  # the parameter's value is its module's to restore
        assert found["n"] == 1


OVERLAPS: dict[str, Any] = {
    "a part of another moment": lambda p, other: {"m": other, "v": other[1:]},
    "another dtype of it": lambda p, other: {"m": other, "v": other.view(torch.int32)},
    "in a list": lambda p, other: {"m": [other], "v": [1, other[:2]]},
    "a part of the parameter": lambda p, other: {"m": p.detach()[1:]},
    "the parameter deeper down": lambda p, other: {"m": [p.detach()]},
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_tensors_that_would_come_back_apart_are_refused_by_key_path(kind: str) -> None:
    parameter, optimizer = one()
    optimizer.state[parameter] = OVERLAPS[kind](parameter, torch.arange(4.0))
    with pytest.raises(UnstorableState, match="shares memory") as caught:
        capture({"opt": optimizer})
    assert caught.value.where.startswith("state['opt']['state']['#0.0']")
    assert caught.value.seen.startswith("shared with state['opt']")


def test_a_setting_that_is_a_parameter_is_refused() -> None:
    parameter, optimizer = one()
    optimizer.param_groups[0]["anchor"] = parameter
    with pytest.raises(UnstorableState) as caught:
        capture({"opt": optimizer})
    assert caught.value.where == "state['opt']['param_groups'][0]['anchor']"


def test_views_without_a_byte_in_common_are_stored(tmp_path: Path) -> None:
    columns = torch.arange(8.0).view(4, 2)
    halves = torch.arange(8.0)
    parameter, optimizer = one(m=columns[:, 0], v=columns[:, 1], a=halves[:4], b=halves[4:])
    found, _ = again(optimizer, tmp_path)
    assert {key: value.tolist() for key, value in found.items()} == {
        key: value.tolist() for key, value in optimizer.state[parameter].items()
    }


def test_parameters_that_share_memory_are_their_modules_business(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    optimizer = Own([nn.Parameter(flat[:6]), nn.Parameter(flat[2:])])
    shared = torch.ones(2)
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"m": shared, "v": shared}
    assert capture({"opt": optimizer}).state["opt"]["param_groups"][0]["params"] == ["#0.0", "#0.1"]


@pytest.mark.parametrize("where", ["state", "setting"])
def test_an_object_inside_an_optimizers_state_is_refused_by_key_path(where: str) -> None:
    parameter, optimizer = one(m=torch.ones(1))
    (optimizer.state[parameter] if where == "state" else optimizer.param_groups[0])["net"] = nn.Linear(1, 1)
    with pytest.raises(UnstorableState, match="would come back as its plain state") as caught:
        capture({"opt": optimizer})
    assert caught.value.where.endswith("['net']")


def test_restoring_leaves_the_stored_containers_alone() -> None:
    parameter, optimizer = one(history=[torch.ones(1)], table={"a": 1})
    stored = optimizer.state_dict()
    other, fresh = one()
    apply_state({"o": fresh}, {"o": stored}, only=["o"])
    fresh.state[other]["history"].append(2)
    fresh.state[other]["table"]["a"] = 3
    assert len(optimizer.state[parameter]["history"]) == 1
    assert optimizer.state[parameter]["table"] == {"a": 1}


def test_a_snapshot_before_the_first_step_clears_every_moment(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    trained(model, optimizer)
    apply_state({"m": model, "o": optimizer}, loaded)
    assert by_name(model, optimizer) == {}


@pytest.mark.parametrize("kind", ["Adam", "SGD", "Rprop"])
def test_complex_parameters_go_on_exactly(kind: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def step(model: nn.ParameterList, optimizer: torch.optim.Optimizer, number: int) -> None:
        model[0].grad = torch.tensor([1 + 2j, number - 1j, 0.5j])
        optimizer.step()

    (model, optimizer), (other, fresh) = build(), build()
    for number in range(2):
        step(model, optimizer, number)
    apply_state({"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}))
    for number in range(2, 4):
        step(model, optimizer, number)
        step(other, fresh, number)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_nothing_is_written_into_the_memory_of_a_parameter_however_they_share_it(tmp_path: Path) -> None:
    def build(fill: float, shared: bool) -> tuple[torch.Tensor, Own]:
        flat = torch.full((12,), 5.0)
        optimizer = Own([nn.Parameter(flat), nn.Parameter(flat[1:3]), nn.Parameter(flat[5:6])])
        moment = flat[8:10] if shared else torch.full((2,), fill)
        optimizer.state[optimizer.param_groups[0]["params"][1]] = {"m": moment}
        return flat, optimizer

    _, optimizer = build(1.0, False)
    flat, live = build(2.0, True)
    apply_state({"o": live}, through_disk(tmp_path, {"o": optimizer}))
    assert flat.tolist() == [5.0] * 12
    assert live.state[live.param_groups[0]["params"][1]]["m"].tolist() == [1.0, 1.0]
