"""Torch's hooks of state_dict and load_state_dict: when they run, what they get, and that it is checked."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.optim import name_parameters, optimizer_to_plain
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_optim import Net, by_name, trained


def test_state_dict_hooks_run_at_every_snapshot_and_their_additions_come_back(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "version": 3})
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    assert calls == ["before"]
    assert loaded["o"]["version"] == 3
    assert "m.a.weight" in loaded["o"]["state"]
    seen: list[Any] = []
    other = Net()
    fresh = torch.optim.Adam(other.parameters())
    fresh.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("version")))
    apply_state({"m": other, "o": fresh}, loaded)
    assert seen == [3]
    assert same(by_name(other, fresh), by_name(model, optimizer))


def test_a_load_pre_hook_gets_torchs_form_in_the_live_order_and_what_it_changes_counts(
    tmp_path: Path,
) -> None:
    model, other = Net("ab"), Net("ba")
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    trained(model, optimizer)
    seen: list[Any] = []

    def hook(_: Any, state: Any) -> Any:
        seen.append(state)
        groups = [{**group, "lr": group["lr"] * 2} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    fresh.register_load_state_dict_pre_hook(hook)
    apply_state({"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}))
    assert len(seen) == 1
    assert seen[0]["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert same(seen[0]["state"][2], optimizer.state[model.a.weight])
    assert fresh.param_groups[0]["lr"] == 0.002
    assert same(by_name(other, fresh)["a.weight"], by_name(model, optimizer)["a.weight"])


def test_a_load_pre_hook_may_adapt_what_wouldnt_fit_and_is_checked(tmp_path: Path) -> None:
    model, other = Net("abc"), Net("ab")
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = [through_disk(tmp_path, {"m": model, "o": optimizer}) for _ in range(2)]

    def cut(to: int) -> Any:
        def hook(_: Any, state: Any) -> Any:
            return {**state, "param_groups": [{**state["param_groups"][0], "params": list(range(to))}]}

        return hook

    fresh = torch.optim.Adam(other.parameters())
    handle = fresh.register_load_state_dict_pre_hook(cut(4))
    apply_state({"o": fresh}, loaded[0], only=["o"])
    assert same(by_name(other, fresh)["b.bias"], by_name(model, optimizer)["b.bias"])
    handle.remove()
    fresh.register_load_state_dict_pre_hook(cut(3))
    before = repr(fresh.state_dict())
    with pytest.raises(StateMismatch, match="group 0 has 3 parameters, the live one 4"):
        apply_state({"o": fresh}, loaded[1], only=["o"])
    assert repr(fresh.state_dict()) == before


def test_a_pair_of_hooks_may_use_a_form_of_its_own(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    optimizer.register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    assert set(loaded["o"]) == {"wrapped"}
    other = Net()
    fresh = torch.optim.Adam(other.parameters())
    with pytest.raises(StateMismatch):
        match_optimizer(fresh, {}, loaded["o"])
    fresh.register_load_state_dict_pre_hook(lambda _, state: state["wrapped"])
    match_optimizer(fresh, {}, loaded["o"]).apply()
    assert same(by_name(other, fresh), by_name(model, optimizer))


def test_a_hook_that_names_parameters_itself_is_stored_as_it_gives_it() -> None:
    model = Net("a")
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)

    def rename(_: Any, state: Any) -> Any:
        names = ["W", "b"]
        return {
            "state": {names[number]: item for number, item in state["state"].items()},
            "param_groups": [{**state["param_groups"][0], "params": names}],
        }

    optimizer.register_state_dict_post_hook(rename)
    stored = optimizer_to_plain(optimizer, name_parameters({"m": model}))
    assert stored["param_groups"][0]["params"] == ["W", "b"]
    assert "param_shapes" not in stored


def test_a_tie_survives_a_load_pre_hook(tmp_path: Path) -> None:
    model = Net("ab")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.b.weight] = {"master": model.b.weight}
    other = Net("ba")
    fresh = torch.optim.SGD(other.parameters(), lr=0.1)
    fresh.register_load_state_dict_pre_hook(lambda _, state: None)
    apply_state({"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}))
    assert fresh.state[other.b.weight]["master"] is other.b.weight


def test_load_post_hooks_run_after_everything_is_set(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    trained(model, optimizer)
    other = Net()
    fresh = torch.optim.Adam(other.parameters())
    seen: list[Any] = []
    fresh.register_load_state_dict_post_hook(lambda o: seen.append((o.param_groups[0]["lr"], len(o.state))))
    apply_state({"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}))
    assert seen == [(0.25, 6)]


class Rebuilds(torch.optim.SGD):
    """A class that makes what it doesn't store in __setstate__, which torch's load calls."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.count = len(self.state)


def test_a_setstate_of_the_users_own_is_called_as_torch_does(tmp_path: Path) -> None:
    model = Net()
    optimizer = Rebuilds(model.parameters(), lr=0.1, momentum=0.5)
    trained(model, optimizer)
    fresh = Rebuilds(model.parameters(), lr=0.1, momentum=0.5)
    apply_state({"m": model, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}))
    assert fresh.count == 6


def test_without_strict_a_load_pre_hook_sees_the_live_parameters_and_the_lists_stay() -> None:
    model, other = Net("abc"), Net("abd")
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    trained(model, optimizer, 3)
    trained(other, fresh, 1)
    kept = deepcopy(fresh.state[other.d.weight])
    seen: list[Any] = []
    fresh.register_load_state_dict_pre_hook(lambda _, state: seen.append(state))
    stored = optimizer_to_plain(optimizer, name_parameters({"model": model}))
    plan = match_optimizer(fresh, name_parameters({"model": other}), stored, strict=False)
    plan.apply()
    assert seen[0]["param_groups"][0]["params"] == [0, 1, 2, 3, 4, 5]
    assert plan.missing == ("model.d.weight", "model.d.bias")
    assert plan.unused == ("model.c.weight", "model.c.bias")
    assert same(fresh.state[other.d.weight], kept)
    assert same(fresh.state[other.a.weight], optimizer.state[model.a.weight])
