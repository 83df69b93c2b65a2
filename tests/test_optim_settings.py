"""The settings of parameter groups: what the checkpoint decides, what the live group keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import UnstorableState
from ckptd.tensors.capture import capture
from ckptd.tensors.optim import optimizer_to_plain
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from round_trip import same, through_disk
from test_optim import Net, by_name, trained


def sgd(count: int = 1, **options: Any) -> torch.optim.SGD:
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(count)]
    return torch.optim.SGD(groups, **{"lr": 0.1, **options})


def restored(live: torch.optim.Optimizer, saved: torch.optim.Optimizer, folder: Path) -> None:
    apply_state({"optimizer": live}, through_disk(folder, {"optimizer": saved}))


def test_an_option_that_only_the_live_group_has_keeps_its_value(tmp_path: Path) -> None:
    live = sgd()
    live.param_groups[0].update(new_in_torch=True, clip=[1, 2])
    restored(live, sgd(lr=0.5), tmp_path)
    assert live.param_groups[0]["new_in_torch"] is True
    assert live.param_groups[0]["clip"] == [1, 2]
    assert live.param_groups[0]["lr"] == 0.5


def test_an_option_that_the_live_group_doesnt_know_is_set_as_torch_does(tmp_path: Path) -> None:
    saved, live = sgd(), sgd()
    saved.param_groups[0].update(gone_from_torch=3, layers=("a", [1]))
    restored(live, saved, tmp_path)
    assert live.param_groups[0]["gone_from_torch"] == 3
    assert same(live.param_groups[0]["layers"], ("a", [1]))


def test_groups_of_different_options_get_their_own(tmp_path: Path) -> None:
    def make(momentum: float) -> torch.optim.Optimizer:
        model = Net("ab")
        return torch.optim.SGD(
            [
                {"params": model.a.parameters(), "lr": 0.5, "momentum": momentum, "nesterov": True},
                {"params": model.b.parameters(), "weight_decay": 0.25, "maximize": True},
            ],
            lr=0.125,
        )

    saved, live = make(0.75), make(0.5)
    restored(live, saved, tmp_path)
    assert same(live.state_dict(), saved.state_dict())
    assert [group["momentum"] for group in live.param_groups] == [0.75, 0]


@pytest.mark.parametrize("option", ["capturable", "fused", "foreach", "differentiable"])
def test_how_a_step_is_computed_stays_the_live_groups_choice(option: str, tmp_path: Path) -> None:
    """A CUDA graph's capturable=True would stop a restored run on the CPU at its first step."""
    model = Net()
    saved, live = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    trained(model, saved)
    saved.param_groups[0][option] = True
    restored(live, saved, tmp_path)
    assert not live.param_groups[0][option]
    trained(model, live)
    del live.param_groups[0][option]
    restored(live, saved, tmp_path)
    assert live.param_groups[0][option] is True  # a class that doesn't know it: as torch does


def test_initial_lr_of_a_scheduler_comes_back_with_or_without_one(tmp_path: Path) -> None:
    saved, live, bare = sgd(), sgd(lr=0.7), sgd(lr=0.7)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(saved, gamma=0.5)
    torch.optim.lr_scheduler.ExponentialLR(live, gamma=0.5)
    saved.step()
    scheduler.step()
    for optimizer in (live, bare):
        restored(optimizer, saved, tmp_path)
        assert optimizer.param_groups[0]["initial_lr"] == 0.1
        assert optimizer.param_groups[0]["lr"] == 0.05
    kept = sgd()
    torch.optim.lr_scheduler.ExponentialLR(kept, gamma=0.5)
    restored(kept, sgd(lr=0.5), tmp_path)
    assert kept.param_groups[0]["initial_lr"] == 0.1


@pytest.mark.parametrize(
    "saved_lr", [torch.tensor(0.5), 0.5, torch.tensor([0.5])], ids=["0-dim", "float", "1-dim"]
)
def test_a_tensor_lr_stays_the_tensor_that_others_hold(saved_lr: Any, tmp_path: Path) -> None:
    held = torch.full_like(saved_lr, 0.1) if isinstance(saved_lr, torch.Tensor) else torch.tensor(0.1)
    live = sgd(lr=held)
    restored(live, sgd(lr=saved_lr), tmp_path)
    assert live.param_groups[0]["lr"] is held
    assert live.defaults["lr"] is held
    assert held.item() == 0.5


def test_one_lr_tensor_in_two_groups_is_one_tensor_again(tmp_path: Path) -> None:
    live = sgd(2, lr=torch.tensor(0.5))
    separate = sgd(2, lr=0.1)
    for group in separate.param_groups:
        group["lr"] = torch.tensor(0.1)
    saved = sgd(2, lr=torch.tensor(0.25))
    for optimizer in (live, separate):
        restored(optimizer, saved, tmp_path)
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first is second
        assert first.item() == 0.25


@pytest.mark.parametrize("as_tensor", [True, False])
def test_two_lrs_arent_written_into_one_live_tensor(as_tensor: bool, tmp_path: Path) -> None:
    saved, live = sgd(2), sgd(2, lr=torch.tensor(0.5))
    for group, lr in zip(saved.param_groups, (0.125, 0.25), strict=True):
        group["lr"] = torch.tensor(lr) if as_tensor else lr
    restored(live, saved, tmp_path)
    assert [float(group["lr"]) for group in live.param_groups] == [0.125, 0.25]


def test_tensors_inside_a_setting_are_written_where_they_are(tmp_path: Path) -> None:
    def make(value: float) -> torch.optim.Optimizer:
        optimizer = sgd()
        optimizer.param_groups[0]["betas"] = (torch.tensor(value), torch.tensor(value / 2))
        return optimizer

    saved, live = make(0.5), make(0.25)
    held = live.param_groups[0]["betas"]
    restored(live, saved, tmp_path)
    assert same(live.param_groups[0]["betas"], (torch.tensor(0.5), torch.tensor(0.25)))
    assert all(new is old for new, old in zip(live.param_groups[0]["betas"], held, strict=True))


def test_names_of_the_live_group_stay_in_the_live_order(tmp_path: Path) -> None:
    model, other = Net("ab"), Net("ba")
    saved = torch.optim.Adam(model.named_parameters())
    live = torch.optim.Adam(other.named_parameters())
    apply_state({"m": other, "o": live}, through_disk(tmp_path, {"m": model, "o": saved}))
    assert live.param_groups[0]["param_names"][0] == "b.weight"


def test_a_function_among_the_settings_is_refused_by_key_path() -> None:
    optimizer = sgd()
    optimizer.param_groups[0]["warmup"] = lambda step: step
    with pytest.raises(UnstorableState) as caught:
        capture({"optimizer": optimizer})
    assert caught.value.where == "state['optimizer']['param_groups'][0]['warmup']"


def test_settings_of_the_stored_state_are_not_shared_with_the_live_one() -> None:
    saved, live = sgd(), sgd()
    saved.param_groups[0]["plan"] = [1, {"a": 2}]
    stored = optimizer_to_plain(saved, {})
    match_optimizer(live, {}, stored).apply()
    live.param_groups[0]["plan"][1]["a"] = 3
    assert saved.param_groups[0]["plan"] == [1, {"a": 2}]


def test_resumed_settings_drive_the_next_step(tmp_path: Path) -> None:
    model = Net()
    saved = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    trained(model, saved)
    other = Net()
    live = torch.optim.SGD(other.parameters(), lr=9.0, momentum=0.1, nesterov=True)
    apply_state({"m": other, "o": live}, through_disk(tmp_path, {"m": model, "o": saved}))
    trained(model, saved)
    trained(other, live)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(by_name(other, live), by_name(model, saved))


def test_a_fraction_isnt_cut_by_a_live_tensor_of_ints(tmp_path: Path) -> None:
    live = sgd(lr=torch.tensor(1))
    restored(live, sgd(lr=0.5), tmp_path)
    assert live.param_groups[0]["lr"] == 0.5
    live = sgd(lr=torch.tensor(1))
    held = live.param_groups[0]["lr"]
    restored(live, sgd(lr=3), tmp_path)
    assert live.param_groups[0]["lr"] is held
    assert held.item() == 3


def test_a_learned_lr_stays_the_leaf_that_learns(tmp_path: Path) -> None:
    for saved_lr in (0.5, torch.tensor(0.5, requires_grad=True)):
        held = torch.tensor(0.1, requires_grad=True)
        live, saved = sgd(), sgd()
        live.param_groups[0]["lr"], saved.param_groups[0]["lr"] = held, saved_lr
        restored(live, saved, tmp_path)
        assert live.param_groups[0]["lr"] is held
        assert held.requires_grad
        assert held.item() == 0.5
