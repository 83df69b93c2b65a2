"""Optimizers with a state_dict or load_state_dict of their own, and objects that wrap one."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import StateMismatch
from ckptd.tensors.capture import capture
from ckptd.tensors.optim import held_optimizer, name_parameters, optimizer_to_plain
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_optim import Net, by_name, trained


class Overrides(torch.optim.Adam):
    """Ends in torch's own load, which casts moments to the parameter's dtype."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict
        super().load_state_dict(state_dict)


class Holds:
    """Forwards the state and nothing else."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.calls = 0

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.calls += 1
        self.inner.load_state_dict(state)


class Shows(Holds):
    """Two optimizers inside, and the groups and state of one shown: a lookahead."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.second = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state


class IsOne(torch.optim.Optimizer):
    """An Optimizer by class that never called Optimizer.__init__: accelerate's AcceleratedOptimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


WRAPPED: dict[str, Any] = {
    "a subclass": lambda parameters: Overrides(parameters, lr=torch.tensor(0.01)),
    "holds one": lambda parameters: Holds(torch.optim.Adam(parameters, lr=torch.tensor(0.01))),
    "shows one": lambda parameters: Shows(torch.optim.Adam(parameters, lr=torch.tensor(0.01))),
    "is one by class": lambda parameters: IsOne(torch.optim.Adam(parameters, lr=torch.tensor(0.01))),
}


def inner(owner: Any) -> torch.optim.Optimizer:
    return getattr(owner, "inner", owner)


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_wrapped_optimizer_is_matched_by_name_and_its_moments_keep_their_dtype(
    kind: str, stepped: bool, tmp_path: Path
) -> None:
    model = Net("abc").bfloat16()
    owner = WRAPPED[kind](model.parameters())
    trained(model, inner(owner))
    for state in inner(owner).state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].float() + 1e-5
        state["history"] = [state["exp_avg_sq"] * float("nan"), {"n": torch.ones(1)}]
    loaded = through_disk(tmp_path, {"model": model, "opt": owner})
    assert loaded["opt"]["param_groups"][0]["params"][0] == "model.a.weight"
    other = Net("cab").bfloat16()
    fresh = WRAPPED[kind](other.parameters())
    held = inner(fresh).param_groups[0]["lr"]
    if stepped:
        trained(other, inner(fresh), 1)
    apply_state({"model": other, "opt": fresh}, loaded)
    wanted, found = by_name(model, inner(owner)), by_name(other, inner(fresh))
    assert same({name: found[name] for name in wanted}, wanted)
    assert inner(fresh).param_groups[0]["lr"] is held
    for state in (*inner(owner).state.values(), *inner(fresh).state.values()):
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()  # what this torch can step with
    for net, optimizer in ((model, inner(owner)), (other, inner(fresh))):
        for name, parameter in net.named_parameters():
            parameter.grad = torch.full_like(parameter, len(name) + ord(name[0]) / 64)
        optimizer.step()
    assert same({n: dict(other.state_dict())[n] for n in model.state_dict()}, dict(model.state_dict()))


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_optimizer_that_doesnt_fit_is_refused_before_its_load_is_called(
    kind: str, tmp_path: Path
) -> None:
    model = Net("abc")
    loaded = through_disk(tmp_path, {"model": model, "opt": WRAPPED[kind](model.parameters())})
    other = Net("abd")
    fresh = WRAPPED[kind](other.parameters())
    with pytest.raises(StateMismatch, match=r"model\.d\.weight is not in the checkpoint"):
        match_optimizer(fresh, name_parameters({"model": other}), loaded["opt"])
    with pytest.raises(StateMismatch):
        apply_state({"model": other, "opt": fresh}, loaded)
    assert not hasattr(fresh, "loaded")
    assert getattr(fresh, "calls", 0) == 0


@pytest.mark.parametrize("kind", WRAPPED)
def test_without_strict_a_wrapped_optimizer_keeps_the_state_of_what_the_checkpoint_lacks(kind: str) -> None:
    model, other = Net("abc"), Net("abd")
    owner, fresh = WRAPPED[kind](model.parameters()), WRAPPED[kind](other.parameters())
    trained(model, inner(owner), 3)
    trained(other, inner(fresh), 1)
    kept = deepcopy(inner(fresh).state[other.d.weight])
    stored = optimizer_to_plain(owner, name_parameters({"model": model}))
    plan = match_optimizer(fresh, name_parameters({"model": other}), stored, strict=False)
    plan.apply()
    assert plan.missing == ("model.d.weight", "model.d.bias")
    assert same(inner(fresh).state[other.d.weight], kept)
    assert same(inner(fresh).state[other.a.weight], inner(owner).state[model.a.weight])


def test_a_wrapped_and_a_bare_optimizer_take_each_others_state(tmp_path: Path) -> None:
    model, other = Net("ab"), Net("ba")
    bare, wrapper = torch.optim.Adam(model.parameters()), Holds(torch.optim.Adam(other.parameters()))
    trained(model, bare)
    apply_state({"m": other, "o": wrapper}, through_disk(tmp_path, {"m": model, "o": bare}))
    assert same(by_name(other, wrapper.inner)["a.weight"], by_name(model, bare)["a.weight"])
    back = torch.optim.Adam(model.parameters())
    apply_state({"m": model, "o": back}, through_disk(tmp_path, {"m": other, "o": wrapper}))
    assert same(by_name(model, back), by_name(model, bare))


def test_a_load_that_was_replaced_on_the_object_is_called(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    seen: list[Any] = []
    optimizer.load_state_dict = seen.append  # type: ignore[method-assign]
    apply_state({"m": model, "o": optimizer}, loaded)
    assert seen[0]["param_groups"][0]["params"] == [0, 1, 2, 3, 4, 5]
    assert set(seen[0]) == {"state", "param_groups"}


def test_what_only_holds_an_optimizer_beside_its_own_state_is_stored_by_its_own() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    assert held_optimizer(scheduler) is optimizer
    captured = capture({"scheduler": scheduler}).state["scheduler"]
    assert captured == scheduler.state_dict()
    assert held_optimizer(nn.Linear(1, 1)) is None
    assert held_optimizer(object()) is None


class Named(torch.optim.Adam):
    """State in torch's shape, but by names of its own on both ways."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        names = ["W", "b"]
        groups = [{**group, "params": names} for group in state["param_groups"]]
        return {"state": {names[n]: item for n, item in state["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: Any) -> None:
        state = {["W", "b"].index(name): item for name, item in state_dict["state"].items()}
        groups = [{**group, "params": [0, 1]} for group in state_dict["param_groups"]]
        super().load_state_dict({"state": state, "param_groups": groups})


def test_a_form_that_only_looks_like_torchs_goes_back_to_its_own_load(tmp_path: Path) -> None:
    model, other = Net("a"), Net("a")
    optimizer, fresh = Named(model.parameters()), Named(other.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    assert list(loaded["o"]["state"]) == ["W", "b"]
    apply_state({"m": other, "o": fresh}, loaded)
    assert same(by_name(other, fresh), by_name(model, optimizer))


class Beside(Holds):
    """Holds one optimizer, but the state in torch's shape that it gives is of other groups."""

    def state_dict(self) -> Any:
        return {"state": {0: {"m": 1}, 1: {"m": 2}}, "param_groups": [{"params": [0]}, {"params": [1]}]}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def test_the_state_of_other_groups_than_those_held_goes_back_as_it_was_given(tmp_path: Path) -> None:
    owner = Beside(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    apply_state({"o": owner}, through_disk(tmp_path, {"o": owner}))
    assert same(owner.loaded, owner.state_dict())


@pytest.mark.parametrize("kind", ["a subclass", "holds one"])
def test_a_master_weight_that_is_the_parameter_is_it_again_behind_an_own_load(
    kind: str, tmp_path: Path
) -> None:
    model, other = Net("ab"), Net("ba")
    owner, fresh = WRAPPED[kind](model.parameters()), WRAPPED[kind](other.parameters())
    trained(model, inner(owner))
    for parameter, state in inner(owner).state.items():
        state["master"] = parameter
    apply_state({"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": owner}))
    assert all(state["master"] is parameter for parameter, state in inner(fresh).state.items())
    assert len(inner(fresh).state) == 4
