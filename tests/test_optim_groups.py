"""Whose settings a parameter group has after a restore over other groups, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.optim import name_parameters, optimizer_to_plain
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import RestoreReport, apply_state
from ckptd_places import places
from round_trip import same, through_disk
from test_optim import Net, by_name, trained

__all__ = ["places"]

NAMES = [f"{layer}.{part}" for layer in "abc" for part in ("weight", "bias")]
BY_NUMBER = "what else goes by a group's number, as a scheduler's rates do, doesn't follow the parameters"


def grouped(model: nn.Module, rows: Sequence[Sequence[str]], lrs: Sequence[Any], **options: Any) -> Any:
    """An Adam with a group for each row of names, each with its lr."""
    found = dict(model.named_parameters())
    return torch.optim.Adam(
        [{"params": [found[name] for name in row], "lr": lr} for row, lr in zip(rows, lrs, strict=True)],
        **options,
    )


def regrouped(
    tmp_path: Path, saved: tuple[Any, Any], live: tuple[Any, Any], **options: Any
) -> tuple[Any, RestoreReport]:
    """The live optimizer after strict=False, and what was reported; strict refuses, and nothing is changed."""
    model, other = Net(), Net()
    optimizer, fresh = grouped(model, *saved, **options), grouped(other, *live, **options)
    trained(model, optimizer)
    before = repr(fresh.state_dict())
    with pytest.raises(StateMismatch):
        apply_state({"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}))
    assert repr(fresh.state_dict()) == before
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    report = apply_state({"m": other, "o": fresh}, loaded, strict=False)
    wanted, found = by_name(model, optimizer), by_name(other, fresh)
    assert same({name: found[name] for name in wanted}, wanted)
    return fresh, report


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def said(report: RestoreReport) -> list[str]:
    assert all(text.startswith("state['o']: ") for text in report.tolerated)
    return [text.removeprefix("state['o']: ") for text in report.tolerated]


def test_swapped_groups_have_the_settings_of_their_parameters_and_it_is_said(tmp_path: Path) -> None:
    fresh, report = regrouped(
        tmp_path, ([NAMES[:2], NAMES[2:]], [0.1, 0.2]), ([NAMES[2:], NAMES[:2]], [0.7, 0.8])
    )
    assert rates(fresh) == [0.2, 0.1]
    assert said(report) == [
        f"the groups are in another order (saved as 1, 0): {BY_NUMBER}",
        "group 0 takes the settings of the checkpoint's group 1, which has its parameters",
        "group 1 takes the settings of the checkpoint's group 0, which has its parameters",
    ]


def test_strict_refuses_swapped_groups_in_one_line_that_says_why(tmp_path: Path) -> None:
    """A scheduler has its rates by number, and they would be another group's."""
    model = Net()
    loaded = through_disk(tmp_path, {"m": model, "o": grouped(model, [NAMES[:2], NAMES[2:]], [0.1, 0.2])})
    live = {"m": model, "o": grouped(model, [NAMES[2:], NAMES[:2]], [0.1, 0.2])}
    with pytest.raises(StateMismatch) as caught:
        apply_state(live, loaded)
    assert caught.value.faults == (
        f"state['o']: the groups are in another order (saved as 1, 0): {BY_NUMBER}",
    )


def test_groups_joined_to_one_keep_its_settings_and_say_whose_they_are_not(tmp_path: Path) -> None:
    fresh, report = regrouped(tmp_path, ([NAMES[:2], NAMES[2:]], [0.1, 0.2]), ([NAMES], [0.7]))
    assert rates(fresh) == [0.7]
    assert said(report) == [
        "2 parameter groups, the live optimizer has 1",
        "group 0 keeps its own settings (lr 0.7, in group 0 0.1, in group 1 0.2): its parameters are in the "
        "checkpoint's groups 0 and 1",
    ]


def test_groups_of_the_same_settings_joined_to_one_have_them(tmp_path: Path) -> None:
    fresh, report = regrouped(
        tmp_path, ([NAMES[:1], NAMES[1:2], NAMES[2:]], [0.1] * 3), ([NAMES], [0.7]), betas=(0.5, 0.75)
    )
    assert rates(fresh) == [0.1]
    assert said(report)[1] == (
        "group 0 takes the settings of the checkpoint's groups 0, 1 and 2, which have its parameters and are the same"
    )


def test_a_group_split_in_two_gives_both_its_settings(tmp_path: Path) -> None:
    fresh, report = regrouped(
        tmp_path, ([NAMES[:2], NAMES[2:]], [0.1, 0.2]), ([NAMES[:1], NAMES[1:2], NAMES[2:]], [0.7, 0.8, 0.9])
    )
    assert rates(fresh) == [0.1, 0.1, 0.2]
    assert said(report) == [
        "2 parameter groups, the live optimizer has 3",
        "group 1 takes the settings of the checkpoint's group 0, which has its parameters",
        "group 2 takes the settings of the checkpoint's group 1, which has its parameters",
        BY_NUMBER,
    ]


def test_the_parts_of_a_split_group_dont_share_its_tensors_unless_they_did(tmp_path: Path) -> None:
    one = torch.tensor(0.5)
    apart, _ = regrouped(
        tmp_path,
        ([NAMES], [torch.tensor(0.25)]),
        ([NAMES[:1], NAMES[1:]], [torch.tensor(0.5), torch.tensor(0.5)]),
    )
    assert rates(apart) == [0.25, 0.25]
    assert apart.param_groups[0]["lr"] is not apart.param_groups[1]["lr"]
    together, _ = regrouped(tmp_path, ([NAMES], [torch.tensor(0.25)]), ([NAMES[:1], NAMES[1:]], [one, one]))
    assert together.param_groups[0]["lr"] is together.param_groups[1]["lr"] is one


def test_a_parameter_that_moved_leaves_its_new_group_between_two(tmp_path: Path) -> None:
    fresh, report = regrouped(
        tmp_path, ([NAMES[:2], NAMES[2:]], [0.1, 0.2]), ([NAMES[:1], NAMES[1:]], [0.7, 0.8])
    )
    assert rates(fresh) == [0.1, 0.8]
    assert said(report) == [
        "m.a.bias is in group 0, live in group 1",
        "group 1 keeps its own settings (lr 0.8, in group 0 0.1, in group 1 0.2): its parameters are in the "
        "checkpoint's groups 0 and 1",
    ]


def test_a_stored_group_that_nobody_takes_and_a_live_one_that_takes_none_are_named(tmp_path: Path) -> None:
    model, other = Net("ab"), Net("bc")
    optimizer = grouped(model, [NAMES[:2], NAMES[2:4]], [0.1, 0.2])
    fresh = grouped(other, [NAMES[4:], NAMES[2:4], []], [0.7, 0.8, 0.9])
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    report = apply_state({"m": other, "o": fresh}, loaded, strict=False, only=["o"])
    assert rates(fresh) == [0.7, 0.2, 0.9]
    assert said(report) == [
        "2 parameter groups, the live optimizer has 3",
        "group 0 keeps its own settings: none of its parameters is in the checkpoint",
        "group 2 keeps its own settings: it has no parameters",
        "the settings of the checkpoint's group 0 are not taken: no live group has its parameters",
    ]


def test_a_group_without_parameters_has_the_settings_of_its_place(tmp_path: Path) -> None:
    model = Net()
    loaded = through_disk(tmp_path, {"m": model, "o": grouped(model, [NAMES, []], [0.1, 0.2])})
    fresh = grouped(model, [NAMES, []], [0.7, 0.8])
    apply_state({"m": model, "o": fresh}, loaded)
    assert rates(fresh) == [0.1, 0.2]


def test_how_steps_are_computed_is_no_setting_that_differs(tmp_path: Path) -> None:
    model = Net()
    optimizer = grouped(model, [NAMES[:2], NAMES[2:]], [0.1, 0.1])
    optimizer.param_groups[0]["foreach"] = True
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    fresh = grouped(model, [NAMES], [0.7])
    apply_state({"m": model, "o": fresh}, loaded, strict=False)
    assert rates(fresh) == [0.1]


def numbered(sizes: Sequence[Sequence[int]], lrs: Sequence[float]) -> torch.optim.Optimizer:
    rows = [[nn.Parameter(torch.ones(size)) for size in row] for row in sizes]
    return torch.optim.Adam([{"params": row, "lr": lr} for row, lr in zip(rows, lrs, strict=True)])


def test_without_names_a_group_has_the_settings_of_its_place_only_where_the_shapes_agree() -> None:
    stored = optimizer_to_plain(numbered([[2], [3, 4]], [0.1, 0.2]), {})
    live = numbered([[2], [3, 5]], [0.7, 0.8])
    plan = match_optimizer(live, {}, stored, strict=False)
    plan.apply()
    assert rates(live) == [0.1, 0.8]
    assert plan.reshaped == ("#1.1",)
    assert plan.tolerated == (
        "group 1 keeps its own settings (lr 0.8, in group 1 0.2): its parameters have no names, and other shapes "
        "than those of the checkpoint's group 1",
    )


@pytest.mark.parametrize("change", ["swapped", "one more", "another group"])
def test_a_parameter_without_a_name_is_left_alone_where_its_place_says_nothing(change: str) -> None:
    def build(rows: list[list[str]]) -> tuple[Net, dict[str, nn.Parameter], torch.optim.Optimizer]:
        model = Net("ab")
        loose = {name: nn.Parameter(torch.ones(2)) for row in rows for name in row if "." not in name}
        known = {**dict(model.named_parameters()), **loose}
        optimizer = torch.optim.SGD(
            [{"params": [known[name] for name in row]} for row in rows], lr=0.1, momentum=0.5
        )
        for number, parameter in enumerate(known.values()):
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, float(number))}
        return model, loose, optimizer

    live_rows = {
        "swapped": [["b.weight", "b.bias", "y"], ["a.weight", "a.bias", "x"]],
        "one more": [["a.weight", "a.bias", "z", "x"], ["b.weight", "b.bias", "y", "w"]],
        "another group": [["a.weight", "b.bias", "x"], ["b.weight", "a.bias", "y"]],
    }[change]
    model, _, optimizer = build([["a.weight", "a.bias", "x"], ["b.weight", "b.bias", "y"]])
    other, loose, fresh = build(live_rows)
    kept = {name: deepcopy(fresh.state[parameter]) for name, parameter in loose.items()}
    stored = optimizer_to_plain(optimizer, name_parameters({"m": model}))
    plan = match_optimizer(fresh, name_parameters({"m": other}), stored, strict=False)
    plan.apply()
    assert same({name: fresh.state[parameter] for name, parameter in loose.items()}, kept)
    assert len(plan.missing) == len(loose)
    assert set(plan.unused) == {"#0.2", "#1.2"}
    assert same(by_name(other, fresh)["b.bias"], by_name(model, optimizer)["b.bias"])


def test_a_load_pre_hook_doesnt_hide_what_the_groups_were(tmp_path: Path) -> None:
    model, other = Net(), Net()
    optimizer = grouped(model, [NAMES[:2], NAMES[2:]], [0.1, 0.2])
    fresh = grouped(other, [NAMES[2:], NAMES[:2]], [0.7, 0.8])
    fresh.register_load_state_dict_pre_hook(lambda _, state: None)
    trained(model, optimizer)
    report = apply_state(
        {"m": other, "o": fresh}, through_disk(tmp_path, {"m": model, "o": optimizer}), strict=False
    )
    assert rates(fresh) == [0.2, 0.1]
    assert len(said(report)) == 3
    assert same({n: by_name(other, fresh)[n] for n in NAMES}, by_name(model, optimizer))


class OwnLoad(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def test_a_load_of_the_optimizers_own_gets_the_settings_by_name_too(tmp_path: Path) -> None:
    def build(rows: Any, lrs: Any) -> tuple[Net, OwnLoad]:
        model = Net()
        optimizer = grouped(model, rows, lrs)
        return model, OwnLoad(optimizer.param_groups)

    model, optimizer = build([NAMES[:2], NAMES[2:]], [torch.tensor(0.25), 0.2])
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    other, fresh = build([NAMES[2:], NAMES[:1], NAMES[1:2]], [0.7, torch.tensor(0.5), torch.tensor(0.5)])
    report = apply_state({"m": other, "o": fresh}, loaded, strict=False)
    assert rates(fresh) == [0.2, 0.25, 0.25]
    assert fresh.param_groups[1]["lr"] is not fresh.param_groups[2]["lr"]
    assert len(said(report)) == 5
    assert same({n: by_name(other, fresh)[n] for n in NAMES}, by_name(model, optimizer))


def test_restore_returns_what_differs_in_the_groups(places: Path) -> None:
    model, other = Net(), Net()
    with ckptd.Client(places, daemon="off") as client:
        client.snapshot(1, {"m": model, "o": grouped(model, [NAMES[:2], NAMES[2:]], [0.1, 0.2])})
    with ckptd.Client(places, daemon="off") as client:
        resumed = client.restore({"m": other, "o": grouped(other, [NAMES], [0.7])}, strict=False)
    assert resumed is not None
    assert resumed.tolerated == (
        "state['o']: 2 parameter groups, the live optimizer has 1",
        "state['o']: group 0 keeps its own settings (lr 0.7, in group 0 0.1, in group 1 0.2): its parameters are in the "
        "checkpoint's groups 0 and 1",
    )


# --- any groups over any others ---------------------------------------------------------------------

rows = st.permutations(NAMES).flatmap(
    lambda order: st.lists(st.integers(0, 6), max_size=3).map(lambda cuts: _cut(order, sorted(cuts)))
)


def _cut(order: list[str], cuts: list[int]) -> list[list[str]]:
    return [order[begin:end] for begin, end in zip([0, *cuts], [*cuts, 6], strict=True)]


@settings(max_examples=150, deadline=None)
@given(rows, rows, st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=4, max_size=4))
def test_any_groups_over_any_others_have_by_name_what_one_group_says(
    saved: list[list[str]], live: list[list[str]], lrs: list[float]
) -> None:
    model, other = Net(), Net()
    optimizer = grouped(model, saved, lrs[: len(saved)])
    fresh = grouped(other, live, [0.7] * len(live))
    for number, name in enumerate(NAMES):
        parameter = dict(model.named_parameters())[name]
        optimizer.state[parameter] = {"step": torch.tensor(float(number))}
    stored = optimizer_to_plain(optimizer, name_parameters({"m": model}))
    plan = match_optimizer(fresh, name_parameters({"m": other}), stored, strict=False)
    plan.apply()
    rate_of = {name: lr for row, lr in zip(saved, lrs, strict=False) for name in row}
    for number, row in enumerate(live):
        own = {rate_of[name] for name in row}
        if row:
            assert fresh.param_groups[number]["lr"] == (own.pop() if len(own) == 1 else 0.7)
    assert same({n: by_name(other, fresh)[n] for n in NAMES}, by_name(model, optimizer))
    as_it_was = [set(row) for row in saved] == [set(row) for row in live]
    assert bool(plan.tolerated) is not as_it_was
    assert (plan.missing, plan.unused, plan.reshaped) == ((), (), ())
