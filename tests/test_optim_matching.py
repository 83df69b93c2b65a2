"""Which stored parameter a live one is: names, positions, groups; and what is refused, all of it and beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import StateMismatch, UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.optim import name_parameters, optimizer_to_plain
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_optim import Net, by_name, trained

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def stored_by(model: nn.Module, make: Make, steps: int = 2) -> Any:
    optimizer = make(model)
    trained(model, optimizer, steps)
    return optimizer_to_plain(optimizer, name_parameters({"model": model}))


def matched(model: nn.Module, make: Make, stored: Any, **options: Any) -> Any:
    optimizer = make(model)
    return match_optimizer(optimizer, name_parameters({"model": model}), stored, **options)


class Tied(nn.Module):
    """One matrix with two names, which of them is first depends on the declaration."""

    def __init__(self, first: str) -> None:
        super().__init__()
        one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        two.weight = one.weight
        for name in (first, "head" if first == "embedding" else "embedding"):
            setattr(self, name, one if name == first else two)
        self.other = nn.Linear(3, 3)


def test_a_tied_weight_is_found_by_whichever_of_its_names_the_checkpoint_has(tmp_path: Path) -> None:
    model = Tied("embedding")
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    assert "model.head.weight" not in loaded["optimizer"]["state"]
    turned = Tied("head")
    fresh = torch.optim.Adam(turned.parameters())
    apply_state({"model": turned, "optimizer": fresh}, loaded)
    assert turned.head.weight is turned.embedding.weight
    assert same(fresh.state[turned.head.weight], optimizer.state[model.head.weight])


def test_a_parameter_in_no_module_is_found_wherever_the_named_ones_are_declared(tmp_path: Path) -> None:
    def build(loose_first: bool) -> tuple[nn.Module, nn.Parameter, torch.optim.Optimizer]:
        model, loose = Net("ab"), nn.Parameter(torch.ones(2))
        rest = list(model.parameters())
        return model, loose, torch.optim.Adam([loose, *rest] if loose_first else [*rest, loose])

    model, loose, optimizer = build(False)
    loose.grad = torch.tensor([1.0, 2.0])
    trained(model, optimizer, 1)
    loose.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    loaded = through_disk(tmp_path, {"model": model, "loose": loose, "optimizer": optimizer})
    other, moved, fresh = build(True)
    apply_state({"model": other, "loose": moved, "optimizer": fresh}, loaded)
    assert same(fresh.state[moved], optimizer.state[loose])
    assert same(by_name(other, fresh), by_name(model, optimizer))


@pytest.mark.parametrize("with_model_when_saved", [True, False])
def test_param_names_carry_over_between_a_state_with_the_model_and_one_without(
    with_model_when_saved: bool, tmp_path: Path
) -> None:
    def state(model: nn.Module, optimizer: Any, with_model: bool) -> dict[str, Any]:
        return {"optimizer": optimizer, **({"model": model} if with_model else {})}

    model = Net("ab")
    optimizer = torch.optim.Adam(model.named_parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, state(model, optimizer, with_model_when_saved))
    other = Net("ba")
    fresh = torch.optim.Adam(other.named_parameters())
    apply_state(state(other, fresh, not with_model_when_saved), loaded, only=["optimizer"])
    wanted, found = by_name(model, optimizer), by_name(other, fresh)
    assert same({name: found[name] for name in wanted}, wanted)
    assert fresh.param_groups[0]["param_names"] == ["b.weight", "b.bias", "a.weight", "a.bias"]


def test_the_same_parameter_in_two_optimizers_has_its_state_in_each(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = Net()
        return {
            "model": model,
            "slow": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "fast": torch.optim.Adam(model.a.parameters()),
        }

    state = build()
    trained(state["model"], state["slow"], 1)
    trained(state["model"], state["fast"], 2)
    state["model"].zero_grad()  # what slow hasn't used would be warned of
    loaded = through_disk(tmp_path, state)
    fresh = build()
    apply_state(fresh, loaded)
    for name in ("slow", "fast"):
        assert same(by_name(fresh["model"], fresh[name]), by_name(state["model"], state[name]))


def test_a_parameter_that_came_late_by_add_param_group_has_its_state_and_settings(tmp_path: Path) -> None:
    def build(late: bool) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        optimizer = torch.optim.Adam([*model.a.parameters(), *model.b.parameters()])
        if late:
            optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.5})
        return model, optimizer

    model, optimizer = build(False)
    trained(model, optimizer, 2)
    optimizer.add_param_group({"params": list(model.c.parameters()), "lr": 0.5})
    trained(model, optimizer, 1)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other, fresh = build(True)
    fresh.param_groups[1]["lr"] = 0.25
    apply_state({"model": other, "optimizer": fresh}, loaded)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert fresh.state[other.c.weight]["step"].item() == 1
    early, without = build(False)
    with pytest.raises(StateMismatch, match="2 parameter groups, the live optimizer has 1") as caught:
        apply_state({"model": early, "optimizer": without}, loaded)
    assert "model.c.weight is in the checkpoint, not in the live optimizer" in str(caught.value)
    assert not without.state


def test_a_parameter_frozen_at_first_and_trained_later_resumes_at_its_own_count(tmp_path: Path) -> None:
    def run(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
        trained(model, optimizer, steps)

    model = Net()
    model.b.requires_grad_(False)
    optimizer = adam(model)
    run(model, optimizer, 2)
    model.b.requires_grad_(True)
    run(model, optimizer, 1)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net()
    fresh = adam(other)
    apply_state({"model": other, "optimizer": fresh}, loaded)
    assert same(fresh.state_dict(), optimizer.state_dict())  # in the order in which the state came into being
    for pair in ((model, optimizer), (other, fresh)):
        run(*pair, 2)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert [fresh.state[p]["step"].item() for p in (other.a.weight, other.b.weight)] == [5.0, 3.0]


def test_an_optimizer_without_parameters_of_a_group_is_restored(tmp_path: Path) -> None:
    model = Net("a")
    optimizer = torch.optim.SGD([{"params": []}, {"params": model.parameters(), "lr": 0.5}], lr=0.1)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = torch.optim.SGD([{"params": []}, {"params": model.parameters(), "lr": 0.1}], lr=0.2)
    apply_state({"model": model, "optimizer": fresh}, loaded)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.5]


class Wide(Net):
    """`b` has another shape, `c` is gone, `d` is new."""

    def __init__(self) -> None:
        super().__init__("a")
        self.b = nn.Linear(4, 6)
        self.d = nn.Linear(4, 4)


def test_a_refusal_lists_every_missing_extra_and_reshaped_parameter_and_changes_nothing(
    tmp_path: Path,
) -> None:
    model = Net()
    optimizer = adam(model)
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Wide()
    fresh = torch.optim.Adam(other.parameters(), lr=0.7)
    trained(other, fresh, 1)
    before = {key: repr(value) for key, value in (("m", other.state_dict()), ("o", fresh.state_dict()))}
    with pytest.raises(StateMismatch) as caught:
        match_optimizer(fresh, name_parameters({"model": other}), loaded["optimizer"])
    assert caught.value.faults == (
        "model.d.weight is not in the checkpoint",
        "model.d.bias is not in the checkpoint",
        "model.c.weight is in the checkpoint, not in the live optimizer",
        "model.c.bias is in the checkpoint, not in the live optimizer",
        "model.b.weight has shape [4, 4], live [6, 4]",
        "model.b.bias has shape [4], live [6]",
    )
    with pytest.raises(StateMismatch):
        apply_state({"model": other, "optimizer": fresh}, loaded)
    assert {"m": repr(other.state_dict()), "o": repr(fresh.state_dict())} == before


def test_the_error_carries_every_fault_where_its_text_shows_the_first(tmp_path: Path) -> None:
    stored = stored_by(Net(), adam)
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(40))
    with pytest.raises(StateMismatch, match="and 66 more") as caught:
        matched(many, adam, stored)
    assert len(caught.value.faults) == 86


def test_without_strict_the_rest_is_restored_and_what_has_no_counterpart_keeps_its_state_and_is_listed() -> (
    None
):
    model = Net()
    stored = stored_by(model, lambda m: torch.optim.Adam(m.parameters(), lr=0.25))
    other = Wide()
    fresh = torch.optim.Adam(other.parameters(), lr=0.7)
    trained(other, fresh, 1)
    kept = {name: repr(fresh.state[p]) for name, p in other.named_parameters() if name[0] in "bd"}
    plan = match_optimizer(fresh, name_parameters({"model": other}), stored, strict=False)
    assert plan.missing == ("model.d.weight", "model.d.bias")
    assert plan.unused == ("model.c.weight", "model.c.bias")
    assert plan.reshaped == ("model.b.weight", "model.b.bias")
    plan.apply()
    assert same(fresh.state[other.a.weight], stored["state"]["model.a.weight"])
    assert {name: repr(fresh.state[p]) for name, p in other.named_parameters() if name[0] in "bd"} == kept
    assert fresh.param_groups[0]["lr"] == 0.25
    assert len(fresh.state) == 6


def test_a_strict_plan_has_nothing_to_list() -> None:
    model = Net()
    plan = matched(model, adam, stored_by(model, adam))
    assert (plan.missing, plan.unused, plan.reshaped) == ((), (), ())


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.Adam([{"params": [first], "lr": 0.125}, {"params": rest, "lr": 0.25}])


def test_without_strict_another_number_of_groups_is_matched_by_name() -> None:
    """A group takes settings from the one stored group that all its parameters were in, else it keeps its own."""
    model = Net()
    split = matched(Net(), two_groups, stored_by(model, adam), strict=False)
    split.apply()
    assert [group["lr"] for group in split.optimizer.param_groups] == [0.001, 0.001]
    assert len(split.optimizer.state) == 6
    joined = matched(Net(), adam, stored_by(model, two_groups), strict=False)
    joined.apply()
    assert joined.optimizer.param_groups[0]["lr"] == 0.001
    assert len(joined.optimizer.state) == 6


def test_without_strict_a_parameter_may_have_moved_to_another_group() -> None:
    stored = stored_by(Net(), two_groups)

    def turned(model: nn.Module) -> torch.optim.Optimizer:
        *rest, last = model.parameters()
        return torch.optim.Adam([{"params": [last]}, {"params": rest}])

    with pytest.raises(StateMismatch, match=r"model\.a\.weight is in group 0, live in group 1"):
        matched(Net(), turned, stored)
    plan = matched(Net(), turned, stored, strict=False)
    plan.apply()
    assert len(plan.optimizer.state) == 6


def test_without_names_another_number_of_parameters_is_refused_even_when_not_strict() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    stored = optimizer_to_plain(optimizer, {})
    fewer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    for strict in (True, False):
        with pytest.raises(StateMismatch, match="group 0 has 2 parameters, the live one 1"):
            match_optimizer(fewer, {}, stored, strict=strict)


def test_without_names_and_strict_another_shape_is_listed_by_position() -> None:
    stored = optimizer_to_plain(
        torch.optim.Adam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]), {}
    )
    live = torch.optim.Adam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4))])
    assert match_optimizer(live, {}, stored, strict=False).reshaped == ("#0.1",)


@pytest.mark.parametrize("change", ["missing", "reshaped", "order"])
def test_state_that_spans_parameters_is_taken_whole_or_not_at_all(change: str) -> None:
    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), max_iter=2)

    other = {"missing": lambda: Net("abd"), "reshaped": Wide, "order": lambda: Net("cba")}[change]()
    stored = stored_by(Net(), lbfgs)
    with pytest.raises(StateMismatch):
        matched(other, lbfgs, stored)
    plan = matched(other, lbfgs, stored, strict=False)
    plan.apply()
    assert not plan.optimizer.state
    listed = {
        "missing": "model.d.weight model.d.bias",
        "reshaped": "model.d.weight model.d.bias",
        "order": "",
    }[change]
    assert (
        " ".join(plan.missing) == listed
    )  # only what the checkpoint lacks; why the rest has no state is said
    assert any("not the same ones in the same order: it was left out" in text for text in plan.tolerated)


@pytest.mark.parametrize("key", [0, True, 1.0, "model.a.weight"])
def test_state_under_a_key_that_stands_for_a_parameter_is_refused_by_key_path(key: Any) -> None:
    model = Net()
    optimizer = adam(model)
    trained(model, optimizer)
    optimizer.state[key] = {"mine": 1}
    with pytest.raises(UnstorableState, match="under a parameter's name or number") as caught:
        capture({"model": model, "nested": [optimizer]})
    assert caught.value.where == f"state['nested'][0]['state'][{key!r}]"


def test_what_is_no_state_of_an_optimizer_is_refused() -> None:
    optimizer = adam(Net())
    for stored in (
        None,
        {},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [{"params": [[]]}]},
    ):
        with pytest.raises(StateMismatch, match="not the state of an optimizer"):
            match_optimizer(optimizer, {}, stored)
    with pytest.raises(StateMismatch, match="no optimizer to take it"):
        match_optimizer(object(), {}, {"state": {}, "param_groups": []})


def test_param_names_dont_mix_up_two_models_that_are_both_in_the_state() -> None:
    """A generator's and a discriminator's parameters may have the same names each in its own module."""
    nets = {"g": Net("ab"), "d": Net("ab")}
    names = name_parameters(nets)
    of_g, of_d = (torch.optim.Adam(nets[key].named_parameters()) for key in ("g", "d"))
    with pytest.raises(StateMismatch, match=r"d\.a\.weight is not in the checkpoint"):
        match_optimizer(of_d, names, optimizer_to_plain(of_g, names))


class Spanning(torch.optim.Optimizer):
    """Not of torch, and like LBFGS keeps a vector over all parameters with the first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        flat = torch.cat([p.detach().reshape(-1) for p in self.param_groups[0]["params"]])
        self.state[self.param_groups[0]["params"][0]] = {"history": [(flat, 1)]}


class Around:
    """Shows an LBFGS's groups and state as its own."""

    def __init__(self, parameters: Any) -> None:
        self.inside = torch.optim.LBFGS(parameters)
        self.inside.state[self.inside.param_groups[0]["params"][0]] = {"d": torch.ones(60)}
        self.param_groups, self.state = self.inside.param_groups, self.inside.state

    def state_dict(self) -> Any:
        return self.inside.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inside.load_state_dict(state)


@pytest.mark.parametrize("kind", [Spanning, Around])
def test_state_that_spans_parameters_is_known_in_classes_that_torch_doesnt_ship(kind: Any) -> None:
    model, same_order, turned = Net("abc"), Net("abc"), Net("cba")
    stored = optimizer_to_plain(kind(model.parameters()), name_parameters({"model": model}))
    match_optimizer(kind(same_order.parameters()), name_parameters({"model": same_order}), stored)
    with pytest.raises(StateMismatch, match="one vector over all parameters"):
        match_optimizer(kind(turned.parameters()), name_parameters({"model": turned}), stored)


def test_settings_that_only_one_side_has_are_no_other_class() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    for change in ({"later": 1}, {"amsgrad": None}):
        plain = optimizer_to_plain(optimizer, name_parameters(state))
        for group in plain["param_groups"]:
            if "later" in change:
                group["of_the_user"] = 1
            else:
                del group["amsgrad"]
        assert match_optimizer(optimizer, name_parameters(state), plain).matches
