"""A load pre-hook clears no fault that it doesn't mend: parameters are numbers then, and nothing goes by those."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import StateMismatch
from ckptd.tensors.optim import name_parameters
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_optim import Net, by_name, trained

Hook = Callable[[Any, Any], Any]


def nothing(_: Any, state: Any) -> None:
    """The least that a hook can do."""


def doubled(_: Any, state: Any) -> Any:
    """A hook that changes what isn't at fault."""
    groups = [{**group, "lr": group["lr"] * 2} for group in state["param_groups"]]
    return {**state, "state": dict(state["state"]), "param_groups": groups}


def optimizer_over(model: nn.Module, rows: list[str]) -> Any:
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [named[f"{letter}.{part}"] for letter in row for part in ("weight", "bias")],
            "lr": 0.1 * number,
        }
        for number, row in enumerate(rows, 1)
    ]
    return torch.optim.Adam(groups)


def refusal(live: dict[str, Any], loaded: Any, hook: Hook | None) -> tuple[str, ...]:
    before, optimizer = deepcopy(live["o"].state_dict()), live["o"]
    handle = optimizer.register_load_state_dict_pre_hook(hook) if hook else None
    with pytest.raises(StateMismatch) as caught:
        apply_state(live, deepcopy(loaded), only=["o"])
    assert same(optimizer.state_dict(), before)
    if handle is not None:
        handle.remove()
    return caught.value.faults


CASES = {
    "other membership": (["ab", "c"], ["cb", "a"], "m"),
    "groups swapped": (["a", "b"], ["b", "a"], "m"),
    "more groups": (["ab"], ["a", "b"], "m"),
    "renamed": (["ab"], ["ab"], "other"),
    "one more": (["ab"], ["abc"], "m"),
    "one less": (["abc"], ["ab"], "m"),
    "another name": (["ab"], ["ac"], "m"),
}


@pytest.mark.parametrize("hook", [nothing, doubled])
@pytest.mark.parametrize("case", CASES)
def test_what_a_hook_leaves_as_it_was_is_refused_as_without_it(case: str, hook: Hook, tmp_path: Path) -> None:
    saved, live, name = CASES[case]
    model, other = Net("abc"), Net("abc")
    optimizer = optimizer_over(model, saved)
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    state = {name: other, "o": optimizer_over(other, live)}
    without = refusal(state, loaded, None)
    assert without and refusal(state, loaded, hook) == without


def grown(kind: Any, tmp_path: Path) -> tuple[dict[str, Any], Any]:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.bias = nn.Parameter(torch.zeros(5))
    optimizer = kind(model.parameters())
    trained(model, optimizer)
    return {"m": other, "o": kind(other.parameters())}, through_disk(tmp_path, {"m": model, "o": optimizer})


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.SGD])
@pytest.mark.parametrize("hook", [nothing, doubled])
def test_another_shape_is_refused_whatever_the_moments_are_called(
    kind: Any, hook: Hook, tmp_path: Path
) -> None:
    state, loaded = grown(kind, tmp_path)
    assert refusal(state, loaded, hook) == ("state['o']: m.bias has shape [2], live [5]",)


def test_a_hook_may_make_the_state_of_a_parameter_that_grew(tmp_path: Path) -> None:
    state, loaded = grown(torch.optim.Adam, tmp_path)
    seen = loaded["o"]["state"]["m.bias"]["exp_avg"].clone()

    def padded(length: int) -> Hook:
        def hook(_: Any, state: Any) -> None:
            entry = state["state"][1]
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = torch.cat([entry[key], torch.zeros(length)])

        return hook

    assert refusal(state, loaded, padded(2)) == (
        "state['o']: m.bias: exp_avg has shape [4], the parameter [5]",
    )
    state["o"].register_load_state_dict_pre_hook(padded(3))
    apply_state(state, loaded, only=["o"])
    assert same(state["o"].state[state["m"].bias]["exp_avg"], torch.cat([seen, torch.zeros(3)]))


def test_a_hook_may_regroup_and_the_state_goes_where_the_names_say(tmp_path: Path) -> None:
    model, other = Net("abc"), Net("abc")
    optimizer = optimizer_over(model, ["ab", "c"])
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    live = {"m": other, "o": optimizer_over(other, ["cb", "a"])}

    def regrouped(rows: list[list[int]]) -> Hook:
        def hook(_: Any, state: Any) -> Any:
            groups = [
                {**group, "params": row} for group, row in zip(state["param_groups"], rows, strict=True)
            ]
            return {**state, "param_groups": groups}

        return hook

    swapped = refusal(live, loaded, regrouped([[4, 5, 0, 1], [2, 3]]))
    assert "state['o']: m.a.weight stands where the load pre-hooks put what m.b.weight had" in swapped
    live["o"].register_load_state_dict_pre_hook(regrouped([[4, 5, 2, 3], [0, 1]]))
    apply_state(live, loaded, only=["o"])
    moments = by_name(other, live["o"])
    assert same(moments, by_name(model, optimizer))


def test_a_hook_may_add_a_parameter_and_take_one_away(tmp_path: Path) -> None:
    model, other = Net("ab"), Net("bc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)

    def hook(_: Any, state: Any) -> None:
        state["param_groups"][0]["params"][:] = [2, 3, 7, 8]

    def wrong(_: Any, state: Any) -> None:
        state["param_groups"][0]["params"][:] = [2, 3, 0, 1]

    put = "state['o']: m.c.weight stands where the load pre-hooks put what m.a.weight had"
    assert put in refusal({"m": other, "o": fresh}, loaded, wrong)
    fresh.register_load_state_dict_pre_hook(hook)
    apply_state({"m": other, "o": fresh}, loaded, only=["o"])
    assert set(by_name(other, fresh)) == {"b.weight", "b.bias"}
    assert same(by_name(other, fresh)["b.bias"], by_name(model, optimizer)["b.bias"])


def test_a_hook_that_moves_what_fits_is_refused_and_without_strict_named(tmp_path: Path) -> None:
    model, other = Net("ab"), Net("ab")
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    live = {"m": other, "o": torch.optim.Adam(other.parameters())}

    def turned(_: Any, state: Any) -> None:
        state["param_groups"][0]["params"][:] = [2, 3, 0, 1]

    assert (
        "m.a.weight stands where the load pre-hooks put what m.b.weight had"
        in refusal(live, loaded, turned)[0]
    )
    live["o"].register_load_state_dict_pre_hook(turned)
    report = apply_state(live, loaded, strict=False)
    assert len(report.tolerated) == 4
    assert "m.b.bias stands where the load pre-hooks put what m.a.bias had" in report.tolerated[3]


def test_a_hook_changes_nothing_live_and_nothing_loaded(tmp_path: Path) -> None:
    model, other = Net("ab"), Net("ac")
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    trained(model, optimizer)
    trained(other, fresh)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    stored, before = deepcopy(loaded), deepcopy(fresh.state_dict())

    def clears(_: Any, state: Any) -> None:
        for entry in state["state"].values():
            entry.clear()

    fresh.register_load_state_dict_pre_hook(clears)
    match_optimizer(fresh, name_parameters({"m": other}), loaded["o"], strict=False)
    assert same(fresh.state_dict(), before)
    assert same(loaded, stored)
