"""The class of optimizer that was saved, told by its name: for every class of torch, and for others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import CheckpointWarning, StateMismatch
from ckptd.tensors.optim import name_parameters, optimizer_to_plain
from ckptd.tensors.optim_class import CLASS, class_of
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.saving import save
from optimizer_kinds import CLASSES, Job
from round_trip import same, through_disk
from test_optim import Net, by_name, trained
from test_optim_wrappers import Holds, IsOne, Shows


class Model(torch.nn.Module):
    """Parameters that every class of torch can be made over."""

    def __init__(self) -> None:
        super().__init__()
        self.only = torch.nn.Linear(2, 2, bias=False)


def stored_by(make: Any) -> dict[str, Any]:
    model = Model()
    optimizer = make(model.parameters())
    return optimizer_to_plain(optimizer, name_parameters({"m": model}))


def matched(make: Any, stored: Any, **options: Any) -> Any:
    model = Model()
    return match_optimizer(make(model.parameters()), name_parameters({"m": model}), stored, **options)


@pytest.mark.parametrize("saved", CLASSES)
def test_the_state_of_every_other_class_of_torch_is_refused_and_listed_when_not_strict(saved: str) -> None:
    stored = stored_by(CLASSES[saved])
    for live in CLASSES.keys() - {saved}:
        said = f"another class was saved: torch.optim.{saved}, the live one is torch.optim.{live}"
        with pytest.raises(StateMismatch) as caught:
            matched(CLASSES[live], stored)
        assert caught.value.faults == (said,)
        plan = matched(CLASSES[live], stored, strict=False)
        assert (plan.tolerated, plan.warnings) == ((said,), ())
    same_class = matched(CLASSES[saved], stored)
    assert (same_class.tolerated, same_class.warnings) == ((), ())


@pytest.mark.parametrize("kind", CLASSES)
def test_torchs_own_load_takes_a_file_with_the_name_in_it(kind: str, tmp_path: Path) -> None:
    job = Job(kind).run(2)
    path = save(tmp_path / "one", job.state, step=2)
    loaded = torch.load(path / "ckpt.pt", weights_only=True)["optimizer"]
    assert loaded[CLASS] == [kind, kind]
    fresh = Job(kind)
    fresh.optimizer.load_state_dict(loaded)
    assert same(values(fresh.optimizer), values(job.optimizer))
    assert CLASS not in fresh.optimizer.state_dict()


def values(optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]
    ]
    return list(state["state"].values()), groups


def test_the_refusal_names_the_optimizer_and_nothing_is_changed(tmp_path: Path) -> None:
    saved, live = Job("Adam").run(2), Job("Adamax").run(1)
    before = repr(live.optimizer.state_dict()), repr(live.model.state_dict())
    with pytest.raises(
        StateMismatch, match=r"state\['optimizer'\]: another class was saved: torch\.optim\.Adam, "
    ):
        apply_state(live.state, through_disk(tmp_path, saved.state))
    assert (repr(live.optimizer.state_dict()), repr(live.model.state_dict())) == before


def test_without_strict_the_report_says_that_another_class_was_taken(tmp_path: Path) -> None:
    saved, live = Job("Adam").run(2), Job("AdamW").run(1)
    report = apply_state(live.state, through_disk(tmp_path, saved.state), strict=False)
    assert report.tolerated == [
        "state['optimizer']: another class was saved: torch.optim.Adam, the live one is torch.optim.AdamW"
    ]


class Renamed(torch.optim.Adam):
    pass


class Again(torch.optim.AdamW):
    pass


class FromScratch(torch.optim.Optimizer):
    """Of no class of torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


def around(wrapper: Any) -> Any:
    return lambda parameters: wrapper(torch.optim.Adam(parameters))


OTHER_NAMES: dict[str, tuple[Any, Any, str, str]] = {
    "a subclass": (torch.optim.Adam, Renamed, "torch.optim.Adam", "Renamed (of torch.optim.Adam)"),
    "two subclasses": (
        Renamed, Again, "Renamed (of torch.optim.Adam)", "Again (of torch.optim.AdamW)",
    ),
    "a wrapper that is one": (torch.optim.Adam, around(IsOne), "torch.optim.Adam", "IsOne (of torch.optim.Adam)"),
    "one of its own": (FromScratch, torch.optim.Adam, "FromScratch", "torch.optim.Adam"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER_NAMES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("strict", [True, False])
def test_under_another_name_than_torchs_nothing_is_refused_and_a_warning_names_both(
    kind: str, turned: bool, strict: bool, tmp_path: Path
) -> None:
    saved, live, was, now = OTHER_NAMES[kind]
    if turned:
        saved, live, was, now = live, saved, now, was
    model, other = Model(), Model()
    state = {"m": model, "o": saved(model.parameters())}
    loaded = through_disk(tmp_path, state)
    with pytest.warns(CheckpointWarning) as caught:
        report = apply_state({"m": other, "o": live(other.parameters())}, loaded, strict=strict)
    assert [str(one.message) for one in caught] == [
        f"state['o']: another class was saved: {was}, the live one is {now}; its state is taken as it is"
    ]
    assert report.tolerated == []


def test_a_wrapper_of_another_class_than_before_is_warned_of() -> None:
    plan = matched(lambda p: IsOne(torch.optim.AdamW(p)), stored_by(around(IsOne)))
    assert plan.warnings == (
        "another class was saved: IsOne (of torch.optim.Adam), the live one is IsOne (of torch.optim.AdamW); "
        "its state is taken as it is",
    )


def test_the_optimizer_that_a_wrapper_holds_counts_and_not_the_wrapper() -> None:
    assert matched(torch.optim.Adam, stored_by(around(Holds))).warnings == ()
    assert matched(around(Holds), stored_by(torch.optim.Adam)).warnings == ()
    with pytest.raises(StateMismatch, match=r"torch\.optim\.Adam, the live one is torch\.optim\.AdamW"):
        matched(torch.optim.AdamW, stored_by(around(Holds)))


def test_a_wrapper_that_holds_several_or_itself_is_of_no_class_of_torch() -> None:
    several = around(Shows)(Model().parameters())
    assert class_of(several) == ["Shows", None]
    itself = IsOne(torch.optim.Adam(Model().parameters()))
    itself.inner = itself
    assert class_of(itself) == ["IsOne", None]


@pytest.mark.parametrize("saved", [Renamed, torch.optim.Adam])
def test_a_subclass_under_the_same_name_is_fine(saved: Any) -> None:
    live = type(saved.__name__, (saved,), {})
    for stored, make in ((stored_by(saved), live), (stored_by(live), saved)):
        plan = matched(make, stored)
        assert (plan.tolerated, plan.warnings) == ((), ())


def test_a_class_of_anothers_under_a_name_of_torchs_is_warned_of() -> None:
    foreign = type("Adam", (FromScratch,), {})
    plan = matched(torch.optim.Adam, stored_by(foreign))
    assert plan.warnings[0].startswith("another class was saved: Adam, the live one is torch.optim.Adam")


@pytest.mark.parametrize("recorded", [None, "Adam", ["Adam"], [1, None], ["Adam", 2], {"Adam": "Adam"}])
def test_a_checkpoint_without_a_name_is_told_by_its_settings(recorded: Any) -> None:
    stored = stored_by(torch.optim.Adam)
    if recorded is None:
        del stored[CLASS]
    else:
        stored[CLASS] = recorded
    assert matched(torch.optim.AdamW, stored).warnings == ()
    with pytest.raises(StateMismatch, match="another class was saved: its groups have amsgrad"):
        matched(torch.optim.SGD, stored)
    assert "its groups have amsgrad" in matched(torch.optim.SGD, stored, strict=False).tolerated[0]


def test_other_settings_under_another_name_are_refused_as_ever() -> None:
    with pytest.raises(StateMismatch, match="another class was saved: its groups have amsgrad"):
        matched(torch.optim.SGD, stored_by(Renamed))


def test_other_settings_of_the_same_class_of_torch_are_another_version() -> None:
    stored = stored_by(torch.optim.Adam)
    for group in stored["param_groups"]:
        group["called_otherwise"] = group.pop("amsgrad")
    assert matched(torch.optim.Adam, stored).matches


def test_torchs_own_state_without_names_is_told_by_settings_too() -> None:
    model = Model()
    with pytest.raises(StateMismatch, match="another class was saved: its groups have"):
        match_optimizer(
            torch.optim.SGD(model.parameters()), {}, torch.optim.Adam(model.parameters()).state_dict()
        )


def test_a_load_pre_hook_may_make_it_another_class_and_sees_torchs_own_form() -> None:
    seen: list[Any] = []

    def hooked(hook: Any) -> Any:
        def build(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(parameters)
            optimizer.register_load_state_dict_pre_hook(hook)
            return optimizer

        return build

    def adapted(_: Any, state: Any) -> None:
        seen.append(dict(state))
        state["param_groups"][0]["weight_decay"] = 0.01

    plan = matched(hooked(adapted), stored_by(torch.optim.Adam))
    assert plan.warnings[0].startswith("another class was saved: torch.optim.Adam, ")
    assert list(seen[0]) == ["state", "param_groups"]
    with pytest.raises(StateMismatch, match=r"another class was saved: torch\.optim\.Adam, "):
        matched(hooked(lambda _, state: None), stored_by(torch.optim.Adam))


def test_a_refused_restore_warns_of_nothing_and_a_warning_raised_leaves_everything(tmp_path: Path) -> None:
    model, other = Net(), Net("abd")
    optimizer, fresh = torch.optim.Adam(model.parameters()), Renamed(other.parameters())
    trained(model, optimizer)
    loaded = through_disk(tmp_path, {"m": model, "o": optimizer})
    with warnings.catch_warnings(record=True) as caught, pytest.raises(StateMismatch):
        apply_state({"m": other, "o": fresh}, loaded)
    assert not caught
    third = Net()
    live = Renamed(third.parameters())
    before = {name: tensor.clone() for name, tensor in third.state_dict().items()}
    with pytest.raises(CheckpointWarning):  # warnings are errors here
        apply_state({"m": third, "o": live}, loaded)
    assert same(dict(third.state_dict()), before)
    assert by_name(third, live) == {}
