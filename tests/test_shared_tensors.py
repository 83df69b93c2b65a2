"""Tensors that an object and another component hold at once: one memory again after a restore, and never otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.tensors.restoring import apply_state
from round_trip import LAYOUT_IDS, LAYOUTS


class Holder:
    """Keeps the very tensors that it is given, and gives those that it has."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)
        self.seen: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "deep": [{"first": self.tensors[0]}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state["tensors"]
        self.first = state["deep"][0]["first"]
        self.seen.append([tensor.sum().item() for tensor in self.tensors])


class Copier(Holder):
    """Makes tensors of its own from those it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = [tensor.clone() for tensor in state["tensors"]]


def made(kind: type[Holder] = Holder, *, tied: bool = True, first: str = "model") -> dict[str, Any]:
    """A model, an optimizer over it that has stepped, and an object that holds one tensor of each kind there is."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False, foreach=False)
    model(torch.rand(3, 2)).sum().backward()
    optimizer.step()
    shared = [
        optimizer.param_groups[0]["lr"],
        model[0].weight.detach(),
        model[1].running_mean,
        optimizer.state[model[0].weight]["exp_avg"],
    ]
    holder = kind(*(shared if tied else [tensor.clone() for tensor in shared]))
    state = {"model": model, "optimizer": optimizer, "holder": holder}
    return {name: state[name] for name in sorted(state, key=lambda name: name != first)}


def theirs(state: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    exp_avg = optimizer.state[model[0].weight]["exp_avg"]
    return [optimizer.param_groups[0]["lr"], model[0].weight, model[1].running_mean, exp_avg]


def tied(state: dict[str, Any]) -> list[bool]:
    pairs = zip(state["holder"].tensors, theirs(state), strict=True)
    return [mine.data_ptr() == other.data_ptr() for mine, other in pairs]


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("first", ["model", "optimizer", "holder"])
def test_what_an_object_shared_with_others_it_shares_again(
    first: str, sharding: ckptd.Sharding, tmp_path: Path
) -> None:
    saved = made()
    path = ckptd.save(tmp_path / "c", saved, step=1, sharding=sharding)
    live = made(tied=False, first=first)
    before = theirs(live)
    apply_state(live, ckptd.load(path))
    assert all(now is then for now, then in zip(theirs(live), before, strict=True))
    assert tied(live) == [True] * 4
    holder = live["holder"]
    assert holder.first.data_ptr() == holder.tensors[0].data_ptr()
    assert holder.seen == [
        [tensor.sum().item() for tensor in saved["holder"].tensors]
    ]  # right when it was given
    live["optimizer"].param_groups[0]["lr"].fill_(0.125)
    assert holder.tensors[0].item() == holder.first.item() == 0.125


def test_ties_inside_one_component_come_back_whichever_is_first(tmp_path: Path) -> None:
    for order in (["holder", "model", "optimizer"], ["optimizer", "model", "holder"]):
        saved, live = made(), made(tied=False)
        path = ckptd.save(tmp_path / order[0], {"all": [{name: saved[name] for name in order}]}, step=1)
        apply_state({"all": [{name: live[name] for name in order}]}, ckptd.load(path))
        assert tied(live) == [True] * 4


def test_what_was_equal_but_apart_stays_apart(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "c", made(tied=False), step=1)
    live = made()
    apply_state(live, ckptd.load(path))
    assert tied(live) == [False] * 4


def test_what_an_object_copies_is_its_own(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "c", saved := made(Copier), step=1)
    live = made(Copier, tied=False)
    apply_state(live, ckptd.load(path))
    assert tied(live) == [False] * 4
    assert all(map(torch.equal, live["holder"].tensors, saved["holder"].tensors))


def test_a_live_tensor_that_came_to_another_value_is_not_handed_on(tmp_path: Path) -> None:
    """A hook has the last word over the optimizer's rate, not over what the object was given."""
    path = ckptd.save(tmp_path / "c", made(), step=1)
    live = made(tied=False)
    live["optimizer"].register_load_state_dict_post_hook(lambda o: o.param_groups[0]["lr"].fill_(0.25))
    apply_state(live, ckptd.load(path))
    assert tied(live) == [False, True, True, True]
    assert [float(rate) for rate in (live["holder"].tensors[0], live["optimizer"].param_groups[0]["lr"])] == [
        0.5,
        0.25,
    ]


def test_a_checkpoint_whose_tensors_an_object_shares_isnt_changed_by_the_training_after(
    tmp_path: Path,
) -> None:
    path = ckptd.save(tmp_path / "c", made(), step=1)
    loaded = ckptd.load(path)
    live = made(tied=False)
    apply_state(live, loaded)
    live["optimizer"].param_groups[0]["lr"].fill_(0.125)
    assert loaded["holder"]["tensors"][0].item() == 0.5


def test_without_the_other_component_an_object_has_tensors_of_its_own(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "c", made(), step=1)
    live = made(tied=False)
    live["optimizer"].param_groups[0]["lr"].fill_(0.25)
    apply_state(live, ckptd.load(path), only=["holder"])
    assert tied(live) == [False] * 4
    assert live["holder"].tensors[0].item() == 0.5
