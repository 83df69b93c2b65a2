from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import StateMismatch
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.capture import capture
from ckptd.tensors.optim import name_parameters, optimizer_to_plain
from ckptd.tensors.restoring import apply_state
from round_trip import LAYOUT_IDS, LAYOUTS, same, through_disk


class Net(nn.Module):
    def __init__(self, order: str = "abc") -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(4, 4))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)

        def closure() -> float:
            return 1.0

        optimizer.step(closure)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
}


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_exactly_whether_or_not_it_ever_stepped(
    kind: str, sharding: Sharding, tmp_path: Path
) -> None:
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    trained(model, optimizer)
    loaded = [through_disk(tmp_path, {"model": model, "optimizer": optimizer}, sharding) for _ in range(2)]
    trained(model, optimizer)
    for warm, components in zip((False, True), loaded, strict=True):
        other = Net()
        fresh = OPTIMIZERS[kind](other.parameters())
        if warm:
            trained(other, fresh, 2)
        apply_state({"model": other, "optimizer": fresh}, components)
        trained(other, fresh)
        assert same(dict(other.state_dict()), dict(model.state_dict()))
        assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_snapshot_before_the_first_step_clears_state_that_came_later(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    trained(model, optimizer)
    optimizer.state["clock"] = {"ticks": 1}  # type: ignore[index] # no parameter's: some optimizers keep such
    optimizer.param_groups[0]["lr"] = 9.0
    apply_state({"model": model, "optimizer": optimizer}, loaded)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_moments_keep_their_dtype(weights: torch.dtype, moments: torch.dtype, tmp_path: Path) -> None:
    model = Net().to(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.rand(parameter.shape).to(moments)}
    wanted = by_name(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net().to(weights)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    apply_state({"model": other, "optimizer": fresh}, loaded)
    assert same(by_name(other, fresh), wanted)


def test_parameters_declared_in_another_order_are_matched_by_name(tmp_path: Path) -> None:
    model = Net("abc")
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net("cab")
    fresh = torch.optim.Adam(other.parameters())
    apply_state({"model": other, "optimizer": fresh}, loaded)
    wanted, found = by_name(model, optimizer), by_name(other, fresh)
    assert same({name: found[name] for name in wanted}, wanted)


def snapshot_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """(everything that a refused restore may not touch)"""
    return ({k: v.clone() for k, v in model.state_dict().items()}, repr(optimizer.state_dict()))


def other_names(model: Net) -> Iterator[nn.Parameter]:
    return (p for name, p in model.named_parameters() if not name.startswith("c"))


MISFITS: dict[str, Any] = {
    "c.weight is in the checkpoint, not in the live": lambda m: torch.optim.Adam(other_names(m)),
    "1 parameter groups, the live optimizer has 2": lambda m: torch.optim.Adam(
        [{"params": list(m.parameters())[:2]}, {"params": list(m.parameters())[2:]}]
    ),
    "not in the checkpoint": lambda m: torch.optim.Adam([*m.parameters(), nn.Parameter(torch.ones(1))]),
}


@pytest.mark.parametrize("fault", MISFITS)
def test_an_optimizer_over_other_parameters_is_refused_with_the_names(fault: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net()
    fresh = MISFITS[fault](other)
    before = snapshot_of(other, fresh)
    with pytest.raises(StateMismatch, match=fault):
        apply_state({"model": other, "optimizer": fresh}, loaded)
    assert same(snapshot_of(other, fresh), before)


def test_a_parameter_in_another_group_is_refused(tmp_path: Path) -> None:
    def grouped(model: Net, first: str) -> torch.optim.Optimizer:
        names = dict(model.named_parameters())
        inside = [p for name, p in names.items() if name.endswith(first)]
        outside = [p for name, p in names.items() if not name.endswith(first)]
        return torch.optim.SGD([{"params": inside, "lr": 0.1}, {"params": outside, "lr": 0.2}])

    model = Net()
    loaded = through_disk(tmp_path, {"model": model, "optimizer": grouped(model, "weight")})
    with pytest.raises(StateMismatch, match=r"model\.a\.weight is in group 0, live in group 1"):
        apply_state({"model": model, "optimizer": grouped(model, "b.weight")}, loaded)


def test_frozen_parameters_have_no_state_and_come_back_so(tmp_path: Path) -> None:
    model = Net()
    model.b.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net()
    other.b.requires_grad_(False)
    fresh = torch.optim.Adam(other.parameters())
    apply_state({"model": other, "optimizer": fresh}, loaded)
    assert same(by_name(other, fresh), by_name(model, optimizer))
    assert not any(name.startswith("b") for name in by_name(other, fresh))


def test_without_a_module_in_the_state_the_optimizers_own_names_are_used(tmp_path: Path) -> None:
    model = Net("ab")
    optimizer = torch.optim.Adam(model.named_parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"optimizer": optimizer})
    assert list(loaded["optimizer"]["state"]) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    other = Net("ba")
    fresh = torch.optim.Adam(other.named_parameters())
    apply_state({"optimizer": fresh}, loaded)
    wanted, found = by_name(model, optimizer), by_name(other, fresh)
    assert same({name: found[name] for name in wanted}, wanted)


def test_without_any_names_position_counts_and_shapes_must_agree(tmp_path: Path) -> None:
    first = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(first, lr=0.1, momentum=0.9)
    loaded = through_disk(tmp_path, {"optimizer": optimizer})
    same_shapes = torch.optim.SGD(
        [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))], lr=0.7, momentum=0.9
    )
    apply_state({"optimizer": same_shapes}, loaded)
    assert same_shapes.param_groups[0]["lr"] == 0.1
    swapped = torch.optim.SGD(
        [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], lr=0.7, momentum=0.9
    )
    with pytest.raises(StateMismatch, match=r"#0\.0 has shape \[2\], live \[3\]"):
        apply_state({"optimizer": swapped}, loaded)
    fewer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.7)
    with pytest.raises(StateMismatch, match="group 0 has 2 parameters, the live one 1"):
        apply_state({"optimizer": fewer}, loaded)


def test_torchs_own_numbered_form_is_matched_by_position_and_moment_shapes() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    other = Net()
    fresh = torch.optim.Adam(other.parameters())
    apply_state(
        {"model": other, "optimizer": fresh},
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    )
    assert same(by_name(other, fresh), by_name(model, optimizer))
    wrong = torch.optim.Adam(list(Net().parameters())[::-1])
    with pytest.raises(StateMismatch, match="exp_avg has shape"):
        apply_state({"optimizer": wrong}, {"optimizer": optimizer.state_dict()})


def test_names_are_unique_and_say_where_the_parameter_is() -> None:
    one, two, three = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    names = name_parameters({"a": {"b": one}, "a.b": two, "list": [three, one]})
    assert list(names.values()) == ["a.b.weight", "a.b.weight#2", "list.0.weight"]


def test_capturing_leaves_the_optimizer_as_it_was() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    before = repr(optimizer.state_dict())
    plain = optimizer_to_plain(optimizer, name_parameters({"model": model}))
    assert plain["param_groups"][0]["params"][0] == "model.a.weight"
    assert repr(optimizer.state_dict()) == before


def test_moments_are_restored_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    held = optimizer.state[model.a.weight]["exp_avg"], optimizer.param_groups[0]["lr"]
    trained(model, optimizer)
    held[1].fill_(0.1)
    apply_state({"model": model, "optimizer": optimizer}, loaded)
    assert optimizer.state[model.a.weight]["exp_avg"] is held[0]
    assert optimizer.param_groups[0]["lr"] is held[1]
    assert held[1].item() == 0.5


class OwnLoad(torch.optim.SGD):
    """An optimizer that overrides how its state is taken."""

    loaded: Any = None

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = state_dict
        super().load_state_dict(state_dict)


def test_an_overridden_load_state_dict_gets_torchs_own_form(tmp_path: Path) -> None:
    model = Net("ab")
    optimizer = OwnLoad(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    other = Net("ba")
    fresh = OwnLoad(other.parameters(), lr=0.2, momentum=0.9)
    apply_state({"model": other, "optimizer": fresh}, loaded)
    assert fresh.loaded["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert same({n: by_name(other, fresh)[n] for n in by_name(model, optimizer)}, by_name(model, optimizer))


class OwnForm(torch.optim.SGD):
    """An optimizer whose state has a form of its own."""

    def state_dict(self) -> Any:
        return {"mine": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: Any) -> None:
        self.param_groups[0]["lr"] = state_dict["mine"]


def test_an_optimizer_with_a_form_of_its_own_is_stored_as_it_gives_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = OwnForm(model.parameters(), lr=0.25)
    loaded = through_disk(tmp_path, {"model": model, "optimizer": optimizer})
    assert loaded["optimizer"] == {"mine": 0.25}
    optimizer.param_groups[0]["lr"] = 1.0
    apply_state({"model": model, "optimizer": optimizer}, loaded)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_two_optimizers_over_two_models_find_their_own(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        g, d = Net(), Net()
        return {
            "nets": {"g": g, "d": d},
            "og": torch.optim.Adam(g.parameters()),
            "od": torch.optim.Adam(d.parameters()),
        }

    state = make()
    trained(state["nets"]["g"], state["og"], 1)
    trained(state["nets"]["d"], state["od"], 4)
    assert capture(state).state["od"]["param_groups"][0]["params"][0] == "nets.d.a.weight"
    loaded = through_disk(tmp_path, state)
    fresh = make()
    apply_state(fresh, loaded)
    for net, optimizer in (("g", "og"), ("d", "od")):
        assert same(
            by_name(fresh["nets"][net], fresh[optimizer]), by_name(state["nets"][net], state[optimizer])
        )
