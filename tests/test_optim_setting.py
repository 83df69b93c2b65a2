"""A setting that is a number on one side and a tensor on the other: the live kind stays, what it rounds is said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.errors import CheckpointWarning
from ckptd.tensors.restoring import apply_state
from round_trip import same


def adam(groups: int = 1, **settings: Any) -> torch.optim.Optimizer:
    parameters = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)]
    made = torch.optim.Adam(parameters)
    for group in made.param_groups:
        group.update(settings)
    return made


def restored(live: torch.optim.Optimizer, saved: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    path = ckptd.save(folder / f"c{len(list(folder.iterdir()))}", {"o": saved}, step=1)
    apply_state({"o": live}, ckptd.load(path))
    return live.param_groups[-1]


def test_a_number_that_the_live_tensor_rounds_is_said_by_group_setting_and_values(tmp_path: Path) -> None:
    live, saved = adam(2, lr=torch.tensor(0.5)), adam(2, lr=0.5)
    held = [group.update(lr=torch.tensor(0.5)) or group["lr"] for group in live.param_groups][-1]
    saved.param_groups[1]["lr"] = 0.1
    with pytest.warns(
        CheckpointWarning,
        match=r"\['o'\]\['param_groups'\]\[1\]\['lr'\]: 0\.1 was stored.* torch\.float32 .* 0\.10000000149011612",
    ) as said:
        group = restored(live, saved, tmp_path)
    assert len(said) == 1  # 0.5 is exact in the first
    assert group["lr"] is held and same(held, torch.tensor(0.1))


def test_a_number_that_the_live_tensor_holds_is_not_worth_a_word(tmp_path: Path) -> None:
    for number, dtype in ((0.1, torch.float64), (0.25, torch.float32), (float("nan"), torch.float32)):
        held = torch.tensor(3.0, dtype=dtype)
        group = restored(adam(lr=held), adam(lr=number), tmp_path)
        assert group["lr"] is held and same(held, torch.tensor(number, dtype=dtype))


def test_a_tensor_of_another_width_goes_into_the_live_one_and_rounding_is_said(tmp_path: Path) -> None:
    held, wide = torch.tensor(3.0), torch.tensor(0.1, dtype=torch.float64)
    with pytest.warns(CheckpointWarning, match=r"\['lr'\]: 0\.1 was stored"):
        group = restored(adam(lr=held), adam(lr=wide), tmp_path)
    assert group["lr"] is held
    held = torch.tensor(3.0, dtype=torch.float64)
    group = restored(adam(lr=held), adam(lr=torch.tensor([0.1])), tmp_path)  # no word: float64 holds it
    assert group["lr"] is held and held.item() == torch.tensor(0.1).item()


def test_what_was_one_tensor_of_another_width_is_one_again(tmp_path: Path) -> None:
    one = torch.tensor(0.5, dtype=torch.float64)
    held = torch.tensor(3.0)
    group = restored(adam(lr=held, initial_lr=torch.tensor(2.0)), adam(lr=one, initial_lr=one), tmp_path)
    assert group["lr"] is group["initial_lr"] is held


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_stored_tensor_becomes_exactly_its_number_where_the_live_setting_is_one(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = torch.tensor(0.1, dtype=dtype)
    group = restored(adam(lr=0.3, momentum=0), adam(lr=stored, momentum=stored), tmp_path)
    assert type(group["lr"]) is type(group["momentum"]) is float
    assert group["lr"] == group["momentum"] == stored.item()


def test_betas_are_settings_each(tmp_path: Path) -> None:
    first, second = torch.tensor(0.5), torch.tensor(0.5)
    with pytest.warns(CheckpointWarning, match=r"\['betas'\]\[1\]: 0\.999 was stored"):
        group = restored(adam(betas=(first, second)), adam(betas=(0.75, 0.999)), tmp_path)
    assert type(group["betas"]) is tuple and group["betas"][0] is first and group["betas"][1] is second
    assert (first.item(), second.item()) == (0.75, torch.tensor(0.999).item())
    group = restored(adam(), adam(betas=(first, second)), tmp_path)
    assert group["betas"] == (0.75, torch.tensor(0.999).item())


def test_the_counts_of_a_counter_are_set_and_not_added(tmp_path: Path) -> None:
    milestones = Counter([2, 5, 5])
    group = restored(adam(at=Counter()), adam(at=milestones), tmp_path)
    assert type(group["at"]) is Counter and group["at"] == Counter([2, 5, 5])


def test_what_a_live_tensor_of_ints_cant_hold_is_kept_as_it_was_stored(tmp_path: Path) -> None:
    for number in (0.5, float("inf"), float("nan"), 300, 2**70):
        group = restored(adam(every=torch.tensor(1, dtype=torch.uint8)), adam(every=number), tmp_path)
        assert repr(group["every"]) == repr(number)


def test_a_learned_setting_stays_a_leaf_where_the_live_one_is_a_number(tmp_path: Path) -> None:
    group = restored(adam(lr=0.3), adam(lr=torch.tensor(0.5, requires_grad=True)), tmp_path)
    assert same(group["lr"], torch.tensor(0.5, requires_grad=True))


def test_a_warning_as_an_error_leaves_everything_untouched(tmp_path: Path) -> None:
    """Warnings are errors in this suite: what is said is said before anything is written."""
    held, more = torch.tensor(0.5), torch.zeros(2)
    path = ckptd.save(tmp_path / "c", {"o": adam(lr=0.1), "more": torch.ones(2)}, step=1)
    with pytest.raises(CheckpointWarning):
        apply_state({"o": adam(lr=held), "more": more}, ckptd.load(path))
    assert held.item() == 0.5 and not more.any()


class Overrides(torch.optim.Adam):
    """Takes its state by a method of its own."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def test_an_optimizer_with_a_load_of_its_own_keeps_its_live_kinds_too(tmp_path: Path) -> None:
    def over(**settings: Any) -> torch.optim.Optimizer:
        made = Overrides([torch.nn.Parameter(torch.ones(2))])
        made.param_groups[0].update(settings)
        return made

    held = torch.tensor(3.0)
    with pytest.warns(CheckpointWarning, match=r"\['lr'\]: 0\.1 was stored"):
        group = restored(over(lr=held), over(lr=0.1), tmp_path)
    assert group["lr"] is held and same(held, torch.tensor(0.1))
    group = restored(over(lr=0.3), over(lr=torch.tensor(0.1)), tmp_path)
    assert type(group["lr"]) is float and group["lr"] == torch.tensor(0.1).item()
