"""What an object's load_state_dict would refuse is refused before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import ckptd
from ckptd.errors import StateMismatch
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.rng import capture_rng_state, plan_rng, unlike_devices
from round_trip import same, through_disk

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "constant": lambda o: lr_scheduler.ConstantLR(o),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=0.1)


def plain(scheduler: Any) -> Any:
    state = copy.deepcopy({k: v for k, v in vars(scheduler).items() if k not in ("optimizer", "_schedulers")})
    return state, [plain(part) for part in getattr(scheduler, "_schedulers", [])]


def refused(live: Any, stored: Any, match: str, **options: Any) -> StateMismatch:
    """Restoring is refused and neither the object nor the model beside it is touched."""
    model = nn.Linear(1, 1)
    weight, state = model.weight.clone(), copy.deepcopy(live.state_dict())
    with pytest.raises(StateMismatch, match=match) as caught:
        apply_state(
            {"m": model, "s": live},
            {"m": nn.Linear(1, 1).state_dict(), "s": copy.deepcopy(stored)},
            only=["m", "s"],
            **options,
        )
    assert same(model.weight.detach(), weight.detach())
    assert same(plain_or(live.state_dict()), plain_or(state))
    return caught.value


def plain_or(state: Any) -> Any:
    return {key: value for key, value in state.items() if not callable(value)}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_takes_its_own_state_and_refuses_every_other_classs(name: str) -> None:
    stored = {other: make(optimizer()).state_dict() for other, make in SCHEDULERS.items()}
    live = SCHEDULERS[name](optimizer())
    apply_state({"s": live}, {"s": copy.deepcopy(stored[name])}, only=["s"])
    for other in SCHEDULERS.keys() - {name}:
        refused(live, stored[other], r"state\['s'\] is not the state of a ")
        refused(live, stored[other], r"state\['s'\] is not the state of a ", strict=False)


def test_a_chain_with_other_parts_is_refused_by_the_part() -> None:
    def chain(*parts: Make) -> Any:
        held = optimizer()
        return lr_scheduler.ChainedScheduler([make(held) for make in parts])

    constant, exponential = SCHEDULERS["constant"], SCHEDULERS["exponential"]
    live = chain(constant, exponential)
    for stored in (chain(constant), chain(constant, exponential, constant)):
        refused(live, stored.state_dict(), r"\['_schedulers'\] has [13] parts, the live ChainedScheduler 2")
    refused(
        live, chain(exponential, constant).state_dict(), r"\['_schedulers'\]\[0\] is not the state of a C"
    )


def test_a_scheduler_of_another_number_of_groups_is_refused() -> None:
    live = SCHEDULERS["step"](optimizer(2))
    refused(live, SCHEDULERS["step"](optimizer(1)).state_dict(), "base_lrs.* is for 1 parameter groups")


def test_a_lambda_that_became_an_object_is_refused() -> None:
    class Rate:
        def __init__(self) -> None:
            self.scale = 0.5

        def __call__(self, step: int) -> float:
            return self.scale

    function = lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5)
    instance = lr_scheduler.LambdaLR(optimizer(), Rate())
    refused(instance, function.state_dict(), "was a function, the live one is an object with state")
    refused(function, instance.state_dict(), "was a object with state|was an object with state")


def test_a_schedulers_state_of_another_version_of_torch_fits() -> None:
    stored = SCHEDULERS["step"](optimizer()).state_dict()
    stored.pop("_is_initial", None)
    stored["verbose"] = False
    apply_state({"s": SCHEDULERS["step"](optimizer())}, {"s": stored}, only=["s"])


def test_a_scheduler_of_the_users_own_may_make_its_keys_late() -> None:
    class Own(lr_scheduler.StepLR):
        pass

    stored = Own(optimizer(), 3).state_dict() | {"late": 1}
    live = Own(optimizer(), 3)
    apply_state({"s": live}, {"s": stored}, only=["s"])
    assert live.late == 1  # type: ignore[attr-defined]


def scaler(*, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=enabled)


def test_a_grad_scaler_that_was_disabled_or_is_now_is_refused_both_ways() -> None:
    refused(scaler(), scaler(enabled=False).state_dict(), "is empty in the checkpoint")
    refused(scaler(enabled=False), scaler().state_dict(), "the live GradScaler is disabled")
    apply_state({"s": scaler(enabled=False)}, {"s": {}}, only=["s"])


def test_a_grad_scalers_state_without_a_key_is_refused_before_half_of_it_is_set() -> None:
    stored = scaler().state_dict()
    del stored["growth_interval"]
    live = scaler()
    live.load_state_dict({**scaler().state_dict(), "scale": 4.0})
    refused(live, stored, "it has no growth_interval")
    refused(live, [1], "a GradScaler in the live state")
    refused(SCHEDULERS["step"](optimizer()), [1], "a scheduler in the live state")


# --- check_state_dict -------------------------------------------------------------------------------


class Picky:
    """Counts, and says beforehand what it takes."""

    def __init__(self, n: int = 0) -> None:
        self.n, self.loads = n, 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def check_state_dict(self, state: Any) -> None:
        if state["n"] < 0:
            raise StateMismatch("negative", seen=str(state["n"]))

    def load_state_dict(self, state: Any) -> None:
        self.n, self.loads = state["n"], self.loads + 1


class PickyModule(nn.Linear):
    def check_state_dict(self, state: Any) -> None:
        raise StateMismatch("not this one", faults=("first", "second"))


class PickySGD(torch.optim.SGD):
    def check_state_dict(self, state: Any) -> None:
        raise StateMismatch("no such optimizer")


def test_every_object_is_asked_and_every_refusal_is_listed_before_anything_is_written() -> None:
    good, bad, odd = Picky(5), Picky(6), Picky(7)
    module = PickyModule(1, 1)
    sgd = PickySGD(module.parameters())
    live = {"good": good, "in": [{"bad": bad}], "odd": odd, "m": module, "o": sgd, "gone": 1}
    stored = {
        "good": {"n": 1}, "in": [{"bad": {"n": -1}}], "odd": {}, "m": module.state_dict(), "o": sgd.state_dict(),
    }  # fmt: skip
    with pytest.raises(StateMismatch) as caught:
        apply_state(live, stored, only=list(live))
    assert caught.value.faults == (
        "state['in'][0]['bad']: negative: -1",
        "state['odd'] failed its check_state_dict: KeyError: 'n'",
        "state['m']: first",
        "state['m']: second",
        "state['o']: no such optimizer",
        "state['gone'] is not in the checkpoint",
    )
    assert [each.loads for each in (good, bad, odd)] == [0, 0, 0]


def test_a_train_state_says_beforehand_what_it_takes() -> None:
    live, other = ckptd.TrainState(step=3, losses=[1.0]), [1]
    bad = {"step": -1, "epoch": True, "batch_in_epoch": 0, "losses": ["x"]}
    with pytest.raises(StateMismatch) as caught:
        apply_state({"t": live, "l": other}, {"t": bad, "l": [2]}, only=["t", "l"])
    assert caught.value.faults == (
        "state['t']: epoch is True, wanted an int of 0 or more",
        "state['t']: losses is a list, wanted a list of numbers",
        "state['t']: step is -1, wanted an int of 0 or more",
    )
    assert (live, other) == (ckptd.TrainState(step=3, losses=[1.0]), [1])


def test_the_error_carries_every_fault_though_its_text_is_short() -> None:
    live = {f"n{number}": number for number in range(100)}
    with pytest.raises(StateMismatch, match="and 80 more") as caught:
        apply_state(dict(live), {}, only=list(live))
    assert len(caught.value.faults) == 100
    again = copy.copy(caught.value)
    assert again.faults == caught.value.faults
    assert str(again) == str(caught.value)


# --- names that differ ------------------------------------------------------------------------------


def test_not_strict_reports_what_an_optimizer_left_alone_by_full_path(tmp_path: Path) -> None:
    def state(width: int, *, head: bool) -> dict[str, Any]:
        model = nn.ModuleDict({"a": nn.Linear(2, width), "b": nn.Linear(1, 1)})
        if head:
            model["head"] = nn.Linear(1, 1)
        else:
            model["tail"] = nn.Linear(1, 1)
        adam = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        adam.step()
        return {"model": model, "opt": adam}

    before, after = state(2, head=True), state(3, head=False)
    report = apply_state(after, through_disk(tmp_path, before), strict=False)
    assert {"state['model']['tail.bias']", "state['opt']['model.tail.bias']"} <= set(report.missing)
    assert {"state['model']['head.bias']", "state['opt']['model.head.bias']"} <= set(report.unused)
    assert {"state['model']['a.bias']", "state['opt']['model.a.bias']"} <= set(report.reshaped)
    moment = after["opt"].state[after["model"]["b"].weight]["exp_avg"]
    assert same(moment, before["opt"].state[before["model"]["b"].weight]["exp_avg"])


def test_an_optimizer_saved_by_names_with_prefixes_in_their_text_fits() -> None:
    model = nn.Linear(2, 1)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    names = ["model.module.weight", "model.module.bias"]
    stored = adam.state_dict()
    old = {
        "state": {names[number]: copy.deepcopy(entry) for number, entry in stored["state"].items()},
        "param_groups": [{**stored["param_groups"][0], "params": names}],
        "param_shapes": {names[0]: [1, 2], names[1]: [1]},
    }
    fresh = nn.Linear(2, 1)
    live = torch.optim.Adam(fresh.parameters())
    apply_state({"model": fresh, "o": live}, {"o": old}, only=["o"])
    assert same(live.state[fresh.bias]["exp_avg"], adam.state[model.bias]["exp_avg"])


# --- devices ----------------------------------------------------------------------------------------


class Devices:
    """As torch.cuda, with so many devices."""

    def __init__(self, count: int) -> None:
        self.count, self.states = count, dict[int, torch.Tensor]()

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (0, "4 CUDA devices, this host has 0; the others are skipped"),
        (1, "this host has 1; the others are skipped"),
        (4, ""),
        (8, "this host has 8; the further devices keep the generators they have"),
    ],
)
def test_cuda_states_go_to_the_devices_of_their_number_and_the_rest_is_said(present: int, said: str) -> None:
    states = [torch.full((16,), number, dtype=torch.uint8) for number in range(4)]
    devices = Devices(present)
    stored = {**capture_rng_state(), "cuda": states}
    apply = plan_rng(stored, devices)
    assert [said in text for text in unlike_devices(stored, devices)] == [True] * bool(said)
    assert devices.states == {}
    apply()
    assert {number: int(state[0]) for number, state in devices.states.items()} == {
        number: number for number in range(min(4, present))
    }
    assert all(state.device.type == "cpu" for state in devices.states.values())


def test_a_checkpoint_without_cuda_states_says_nothing_to_a_host_with_devices() -> None:
    devices = Devices(2)
    stored = {**capture_rng_state(), "cuda": []}
    plan_rng(stored, devices)()
    assert devices.states == {} and unlike_devices(stored, devices) == []
