"""Data that shares its memory with what objects hold, or what isn't restored, comes apart where it was stored apart."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.rng import capture_rng_state
from ckptd.tensors.shared_tensors import SharedTensors
from round_trip import same, through_disk


class InPlace:
    """An average that copies what it is given into the tensors that it has."""

    def __init__(self, shadow: torch.Tensor) -> None:
        self.shadow = {"w": shadow}

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow["w"].copy_(state["w"])


class Keeps:
    """Keeps the very tensor that it is given."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


class Unready(InPlace):
    """Gives no state before it has been given one."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not started")


def trained(lr: Any = None, steps: int = 1) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.125) if lr is None else lr)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


# --- what objects hold ------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rollback", [True, False])
def test_a_kept_copy_that_is_the_optimizers_own_state_gets_its_own(
    first: bool, rollback: bool, tmp_path: Path
) -> None:
    state = trained()
    kept = {"best": {"opt": copy.deepcopy(state["optimizer"].state_dict())}}
    trained_on, model = state["optimizer"], state["model"]
    model(torch.ones(1, 2)).sum().backward()
    trained_on.step()
    loaded = through_disk(tmp_path, {**state, **kept})
    wanted = copy.deepcopy((kept["best"]["opt"], trained_on.state_dict()))
    trained_on.step()
    best = {"best": {"opt": trained_on.state_dict()}}
    live = {**best, **state} if first else {**state, **best}
    before = trained_on.state[model.weight]["exp_avg"]
    apply_state(live, loaded, rollback=rollback)
    assert same(live["best"]["opt"], wanted[0])
    assert same(trained_on.state_dict(), wanted[1])
    assert trained_on.state[model.weight]["exp_avg"] is before
    trained_on.step()
    assert same(live["best"]["opt"], wanted[0])


def test_a_kept_copy_that_is_a_schedulers_own_state_gets_its_own(tmp_path: Path) -> None:
    scheduler = torch.optim.lr_scheduler.MultiStepLR(trained()["optimizer"], [2, 4])
    best = copy.deepcopy(scheduler.state_dict())
    best["base_lrs"], best["last_epoch"] = [0.75], 9
    loaded = through_disk(tmp_path, {"scheduler": scheduler, "best": best})
    before = copy.deepcopy(scheduler.state_dict())
    state = {"scheduler": scheduler, "best": scheduler.state_dict()}
    apply_state(state, {"best": loaded["best"]}, only=["best"])
    assert same(scheduler.state_dict(), before) and same(state["best"], best)


def test_a_kept_tensor_that_is_tied_to_an_optimizers_in_the_checkpoint_stays_tied(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        made = trained()
        return {**made, "rate": [made["optimizer"].param_groups[0]["lr"]]}

    saved, live = state(), state()
    (rate,) = live["rate"]
    saved["rate"][0].fill_(0.5)
    apply_state(live, through_disk(tmp_path, saved))
    assert live["rate"][0] is rate is live["optimizer"].param_groups[0]["lr"] and rate.item() == 0.5


@pytest.mark.parametrize("rollback", [True, False])
def test_a_kept_copy_that_is_an_objects_own_state_gets_its_own(rollback: bool, tmp_path: Path) -> None:
    average = InPlace(torch.full((2,), 5.0))
    loaded = through_disk(tmp_path, {"ema": average, "best": {"ema": {"w": torch.ones(2)}}})
    held = average.shadow["w"].fill_(0)
    state: dict[str, Any] = {"ema": average, "best": {"ema": average.state_dict()}}
    apply_state(state, loaded, rollback=rollback)
    assert average.shadow["w"] is held and held.tolist() == [5, 5]
    assert state["best"]["ema"]["w"].tolist() == [1, 1]


def test_a_list_that_is_an_objects_too_stays_one_where_its_values_agree(tmp_path: Path) -> None:
    class Meter:
        def __init__(self, losses: list[float]) -> None:
            self.losses = losses

        def state_dict(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.losses[:] = state["losses"]

    losses = [1.0]
    loaded = through_disk(tmp_path, {"meter": Meter([2.0, 3.0]), "losses": [2.0, 3.0]})
    other = through_disk(tmp_path, {"meter": Meter([4.0]), "losses": [5.0]})
    state = {"meter": Meter(losses), "losses": losses}
    apply_state(state, loaded)
    assert state["losses"] is losses == [2.0, 3.0]
    apply_state(state, other)
    assert (losses, state["losses"]) == ([4.0], [5.0])


def test_an_object_that_gives_no_state_yet_is_restored_all_the_same(tmp_path: Path) -> None:
    live = Unready(torch.zeros(2))
    apply_state(
        {"ema": live, "n": [torch.ones(1)]},
        through_disk(tmp_path, {"ema": InPlace(torch.ones(2)), "n": [torch.ones(1)]}),
    )
    assert live.shadow["w"].tolist() == [1, 1]


def sharing(kind: str, tensor: torch.Tensor) -> Any:
    if kind == "object":
        return InPlace(tensor)
    model = nn.Linear(2, 2)
    if kind == "buffer":
        model.register_buffer("held", tensor)
        return model
    return torch.optim.SGD(model.parameters(), lr=tensor)


def sharing_of(owner: Any) -> torch.Tensor:
    if isinstance(owner, InPlace):
        return owner.shadow["w"]
    tensor: torch.Tensor = owner.held if isinstance(owner, nn.Module) else owner.param_groups[0]["lr"]
    return tensor


@pytest.mark.parametrize("one", ["optimizer", "object", "buffer"])
@pytest.mark.parametrize("other", ["optimizer", "object", "buffer"])
def test_two_objects_that_share_a_tensor_and_had_two_values_are_refused(
    one: str, other: str, tmp_path: Path
) -> None:
    def state(value: float, second: float | None = None) -> dict[str, Any]:
        first = torch.tensor(value)
        return {
            "a": sharing(one, first),
            "b": sharing(other, first if second is None else torch.tensor(second)),
        }

    loaded = through_disk(tmp_path, state(0.125, 0.25))
    agreeing = through_disk(tmp_path, state(0.5))
    live = state(1.0)
    with pytest.raises(StateMismatch, match=r"state\['[ab]'\].* shares its memory with state\['[ab]'\]"):
        apply_state(live, loaded)
    assert [sharing_of(live[name]).item() for name in "ab"] == [1, 1]
    apply_state(live, agreeing)
    assert [sharing_of(live[name]).item() for name in "ab"] == [0.5, 0.5]


def test_groups_of_one_optimizer_that_share_a_rate_still_come_apart(tmp_path: Path) -> None:
    def state(*rates: torch.Tensor) -> dict[str, Any]:
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        groups = [{"params": part.parameters(), "lr": rate} for part, rate in zip(model, rates, strict=True)]
        return {"m": model, "o": torch.optim.SGD(groups)}

    live = state(rate := torch.tensor(0.5), rate)
    apply_state(live, through_disk(tmp_path, state(torch.tensor(0.125), torch.tensor(0.25))))
    assert [group["lr"].item() for group in live["o"].param_groups] == [0.125, 0.25]


def test_a_scheduler_that_holds_its_optimizers_rate_takes_another_value(tmp_path: Path) -> None:
    """As its base_lrs do in torch 2.6; it keeps what it is given."""

    def state(*, tied: bool) -> dict[str, Any]:
        made = trained()
        scheduler = torch.optim.lr_scheduler.StepLR(made["optimizer"], 1)
        rate = made["optimizer"].param_groups[0]["lr"]
        scheduler.base_lrs = [rate if tied else torch.tensor(0.5)]
        return {**made, "scheduler": scheduler}

    live = state(tied=True)
    apply_state(live, through_disk(tmp_path, state(tied=False)))
    assert live["scheduler"].base_lrs[0].item() == 0.5
    assert live["optimizer"].param_groups[0]["lr"].item() == 0.125


# --- what isn't restored ----------------------------------------------------------------------------


def test_data_that_was_asked_for_alone_isnt_written_through_to_the_model(tmp_path: Path) -> None:
    source = nn.BatchNorm1d(2)
    best = {name: torch.full_like(value, 7) for name, value in source.state_dict().items()}
    loaded = through_disk(tmp_path, {"model": source, "best": best})
    live = nn.BatchNorm1d(2)
    before = copy.deepcopy(live.state_dict())
    for only, components in ((["best"], loaded), (None, {"best": loaded["best"]})):
        state: dict[str, Any] = {"model": live, "best": live.state_dict()}
        apply_state(state, dict(components), only=only, strict=only is not None)
        assert same(live.state_dict(), before)
        assert same(dict(state["best"]), best)


def test_data_isnt_written_through_to_a_buffer_that_no_checkpoint_holds() -> None:
    live = nn.Linear(1, 1)
    live.register_buffer("cache", torch.zeros(2), persistent=False)
    state: dict[str, Any] = {"model": live, "kept": [live.cache]}
    stored = {"model": live.state_dict(), "kept": [torch.ones(2)]}
    apply_state(state, stored, only=["model", "kept"])
    assert (live.cache.tolist(), state["kept"][0].tolist()) == ([0, 0], [1, 1])  # type: ignore[union-attr,operator]


KEPT: dict[str, Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "missing beside it": lambda x: ({"d": {"a": x, "b": x}}, {"d": {"b": x + 1}}),
    "missing elsewhere": lambda x: ({"d": {"a": x}, "b": [x]}, {"d": {}, "b": [x + 1]}),
    "missing component": lambda x: ({"a": [x], "b": {"x": x}}, {"b": {"x": x + 1}}),
    "another shape": lambda x: ({"a": x, "b": x[:2]}, {"a": x[:1] + 1, "b": x[:2] + 1}),
    "part of it": lambda x: ({"d": {"a": x, "b": x[1:]}}, {"d": {"b": x[1:] + 1}}),
    "in a list of objects": lambda x: ({"d": [nn.Identity(), x], "b": [x]}, {"d": [{}], "b": [x + 1]}),
}


@pytest.mark.parametrize("case", KEPT)
@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_data_that_keeps_its_value_isnt_written_through_to(case: str, make: Any) -> None:
    value = make(3)
    if case == "in a list of objects" and make is np.zeros:
        return  # a list that lacks an array has lost it
    state, stored = KEPT[case](value)
    apply_state(state, stored, only=list(state), strict=False)
    assert value.tolist() == [0, 0, 0]
    held = state["b"] if "b" in state else state["d"]["b"]
    held = held[0] if isinstance(held, list) else held["x"] if isinstance(held, dict) else held
    assert set(held.tolist()) == {1}


@pytest.mark.parametrize("only", [["best"], ["best", "n"]])
def test_a_dict_that_stands_in_a_component_that_wasnt_asked_for_too_comes_apart(only: list[str]) -> None:
    both = {"loss": 1.0}
    state = {"now": both, "best": both, "n": 0}
    apply_state(state, {"best": {"loss": 2.0}, "n": 1}, only=only)
    assert (state["now"], state["best"], both) == ({"loss": 1.0}, {"loss": 2.0}, {"loss": 1.0})


# --- ties that the live side doesn't have yet -------------------------------------------------------


NOT_YET: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "another shape": lambda: torch.zeros(3),
    "another kind": lambda: 3,
}


@pytest.mark.parametrize("case", NOT_YET)
@pytest.mark.parametrize("partner", ["module", "optimizer", "data"])
def test_a_stored_tie_is_made_whatever_stands_there(case: str, partner: str, tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {**trained(), "data": [torch.zeros(2)]}

    def tensor(of: dict[str, Any]) -> torch.Tensor:
        held = {
            "module": of["model"].weight,
            "optimizer": of["optimizer"].param_groups[0]["lr"],
            "data": of["data"][0],
        }
        return held[partner]

    saved = state()
    saved["ref"] = {
        "x": tensor(saved).detach(),
        "deep": {"list": [tensor(saved).detach()]},
        "h": [tensor(saved).detach()],
    }
    live = state()
    live["ref"] = {"x": NOT_YET[case](), "deep": NOT_YET[case](), "h": []}
    apply_state(live, through_disk(tmp_path, saved), rollback=True)
    ref, own = live["ref"], tensor(live)
    for each in (ref["x"], ref["deep"]["list"][0], ref["h"][0]):
        assert each.data_ptr() == own.data_ptr() and same(each, own.detach())


def test_a_stored_tie_of_a_component_that_was_removed_since_is_made(tmp_path: Path) -> None:
    saved = {"a": [torch.ones(2)], "n": 1}
    loaded = through_disk(tmp_path, {**saved, "b": saved["a"][0]})
    live = {"a": [torch.zeros(2)], "n": 2}
    apply_state(live, loaded, rollback=True)
    assert live["b"].data_ptr() == live["a"][0].data_ptr()


def test_tied_tensors_are_tied_on_another_device_too() -> None:
    shared, stored = SharedTensors(), nn.Parameter(torch.ones(2))
    there = torch.device("meta")
    one, other, else_ = (shared.lend_on(there, each) for each in (stored, stored.detach(), torch.ones(2)))
    assert one.is_meta and one.requires_grad and not other.requires_grad
    storages = [each.untyped_storage()._cdata for each in (one, other, else_)]
    assert storages[0] == storages[1] != storages[2]


# --- a rollback at the top ------------------------------------------------------------------------


def test_a_rollback_follows_the_stored_structure_at_the_top_too(tmp_path: Path) -> None:
    with ckptd.Client(tmp_path, daemon="off") as client:
        tensor, lost = torch.zeros(3), {"x": 1}
        state: dict[str, Any] = {"model": nn.Linear(1, 1), "a": tensor, "b": lost, "c": [1]}
        client.snapshot(1, state)
        del state["b"], state["c"]
        state |= {"number": 3, "tensor": torch.ones(2), "c": 4, "same": tensor.fill_(1)}
        with pytest.warns(
            ckptd.CheckpointWarning, match=r"state\['b'\] isn't in the live state, and is set as"
        ):
            resumed = client.restore(state)
        assert resumed is not None and resumed.dropped == (
            "state['number']",
            "state['tensor']",
            "state['same']",
        )
        assert set(state) == {"model", "a", "b", "c"}
        assert state["a"] is tensor and tensor.tolist() == [0, 0, 0]
        assert (state["b"], state["c"]) == ({"x": 1}, [1])


def test_objects_made_or_removed_since_refuse_a_rollback(tmp_path: Path) -> None:
    with ckptd.Client(tmp_path, daemon="off") as client:
        state: dict[str, Any] = {"model": nn.Linear(1, 1), "n": 1, "holder": {"m": nn.Linear(1, 1)}}
        client.snapshot(1, state)
        removed = state.pop("holder")
        state |= {"new": nn.Linear(1, 1), "n": 2}
        with pytest.raises(StateMismatch) as caught:
            client.restore(state)
        assert caught.value.faults == (
            "state['new'] is not in the checkpoint",
            "state['holder'] is in the checkpoint, not in the live state",
        )
        del state["new"]
        state["holder"] = removed
        client.restore(state)
        assert state["n"] == 1


# --- an object's state where None is live -----------------------------------------------------------

NOT_LIVE: dict[str, tuple[Any, Any, str]] = {
    "component": (lambda o: o, None, "state['x']"),
    "in a dict": (lambda o: {"opt": o, "n": 1}, {"opt": None, "n": 0}, "state['x']['opt']"),
    "missing in a dict": (lambda o: {"opt": o, "n": 1}, {"n": 0}, "state['x']['opt']"),
    "in a list": (lambda o: [o, 1], [None, 0], "state['x'][0]"),
    "missing in a list": (lambda o: [1, o], [1], "state['x'][1]"),
    "dict for None": (lambda o: {"opt": o}, None, "state['x']"),
}


@pytest.mark.parametrize("case", NOT_LIVE)
@pytest.mark.parametrize("rollback", [True, False])
def test_an_optimizers_state_doesnt_become_data_where_there_is_none(
    case: str, rollback: bool, tmp_path: Path
) -> None:
    saved, live, path = NOT_LIVE[case]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    loaded = through_disk(tmp_path, {"x": saved(optimizer)})
    state = {"x": (before := copy.deepcopy(live))}
    with pytest.raises(StateMismatch) as caught:
        apply_state(state, dict(loaded), rollback=rollback)
    assert caught.value.faults == (f"{path} is in the checkpoint, not in the live state",)
    assert state["x"] is before and same(before, live)
    report = apply_state(state, loaded, strict=False)
    assert report.unused == [path]


def test_a_kept_copy_of_an_objects_state_is_data(tmp_path: Path) -> None:
    made = trained()
    saved = {"best": {name: copy.deepcopy(each.state_dict()) for name, each in made.items()}}
    state: dict[str, Any] = {"best": None}
    apply_state(state, through_disk(tmp_path, saved))
    assert same(state, saved)


# --- warnings as errors -----------------------------------------------------------------------------


def obstinate(components: dict[str, Any], said: str, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ckptd.CheckpointWarning, match=said):
            apply_state(state, components)


def test_what_can_be_known_is_warned_of_before_anything_is_written() -> None:
    rng = {**capture_rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 9}
    state = {"n": 1, "t": torch.zeros(1)}
    obstinate({"n": 2, "t": torch.ones(1), "rng": rng}, "RNG states of 9 CUDA devices", state)
    assert (state["n"], state["t"].item()) == (1, 0)  # type: ignore[attr-defined]


def test_what_shows_only_while_it_is_written_is_warned_of_when_everything_is_done(tmp_path: Path) -> None:
    def state(seed: int) -> dict[str, Any]:
        made = trained()
        bits = np.random.MT19937(seed)
        return {"g": np.random.Generator(bits), **made, "ema": Keeps(made["model"].weight.detach())}

    saved, live = state(7), state(7)
    loaded = through_disk(tmp_path, {**saved, "n": 2})
    live["n"] = 1
    with mock.patch("ckptd.tensors.generator_state.continue_spawning", lambda *_: False):
        obstinate(loaded, r"\['g'\]: its draws go on", live)
    assert live["n"] == 2 and live["g"].random() == saved["g"].random()
    assert live["ema"].tensor.data_ptr() == live["model"].weight.data_ptr()
