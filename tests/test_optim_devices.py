"""Where state lives: `step` on the host unless a kernel on the device reads it. The device here is "meta"."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.tensors.optim import name_parameters, optimizer_to_plain
from ckptd.tensors.optim_restore import match_optimizer
from ckptd.tensors.restoring import apply_state
from optimizer_kinds import CLASSES, Job
from round_trip import same, through_disk
from test_optim import trained

CAPTURABLE = [k for k, c in CLASSES.items() if "capturable" in inspect.signature(c.__init__).parameters]


def stored_by(kind: str, **options: Any) -> Any:
    model = nn.Linear(2, 2)
    optimizer = CLASSES[kind](model.parameters(), **options)
    trained(model, optimizer)
    return optimizer_to_plain(optimizer, name_parameters({"m": model}))


def on_device(kind: str, stored: Any, **options: Any) -> dict[str, torch.Tensor]:
    model = nn.Linear(2, 2, device="meta")
    optimizer = CLASSES[kind](model.parameters(), **options)
    match_optimizer(optimizer, name_parameters({"m": model}), stored).apply()
    state: dict[str, torch.Tensor] = optimizer.state[model.weight]
    return state


def devices(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {key: value.device.type for key, value in state.items()}


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "Adadelta"]
)
def test_without_capturable_counters_are_on_the_host_and_moments_on_the_device(kind: str) -> None:
    found = devices(on_device(kind, stored_by(kind)))
    host = {key for key, device in found.items() if device == "cpu"}
    assert host == {"step", "mu_product"} & found.keys()
    assert {*found.values()} == {"cpu", "meta"}


@pytest.mark.parametrize("kind", CAPTURABLE)
def test_with_capturable_in_the_live_group_everything_is_on_the_device(kind: str) -> None:
    stored = stored_by(kind)
    assert not stored["param_groups"][0]["capturable"]
    assert {*devices(on_device(kind, stored, capturable=True)).values()} == {"meta"}


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_with_fused_in_the_live_group_the_step_is_on_the_device_in_the_dtype_of_the_kernel(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        stored = stored_by(kind, **({"momentum": 0.9} if kind == "SGD" else {}))
    finally:
        torch.set_default_dtype(torch.float32)
    model = nn.Linear(2, 2, device="meta", dtype=torch.float64)
    optimizer = CLASSES[kind](model.parameters(), **({"momentum": 0.9} if kind == "SGD" else {}))
    optimizer.param_groups[0]["fused"] = True  # the constructor of some versions asks the device
    match_optimizer(optimizer, name_parameters({"m": model}), stored).apply()
    state = optimizer.state[model.weight]
    assert {*devices(state).values()} == {"meta"}
    assert {key: value.dtype for key, value in state.items()} == {
        key: torch.float32 if key == "step" else torch.float64 for key in state
    }


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad"])
def test_a_run_without_fused_goes_on_with_it_on_the_cpu(kind: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        job = Job(kind).run(2)
        assert job.optimizer.state[job.model.scale]["step"].dtype is torch.float64
        other = Job(kind, {"fused": True})
        apply_state(other.state, through_disk(tmp_path, job.state))
        other.run(4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert other.optimizer.state[other.model.scale]["step"] == 4
    assert other.optimizer.state[other.model.scale]["step"].dtype is torch.float32


def test_a_live_tensor_says_where_the_next_one_goes() -> None:
    stored = stored_by("Adam")
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model.weight] = {"exp_avg": torch.zeros(2, 2)}  # moments offloaded to the host
    match_optimizer(optimizer, name_parameters({"m": model}), stored).apply()
    assert devices(optimizer.state[model.weight]) == {"step": "cpu", "exp_avg": "cpu", "exp_avg_sq": "meta"}


def test_a_step_per_element_is_no_counter() -> None:
    stored = stored_by("SGD", momentum=0.5)
    for state in stored["state"].values():
        state["step"] = torch.ones(2, 2)
    assert devices(on_device("SGD", stored))["step"] == "meta"


def test_settings_go_where_the_live_ones_are() -> None:
    stored = stored_by("Adam", lr=torch.tensor(0.5))
    model = nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.param_groups[0]["lr"] = held = torch.zeros((), device="meta")
    match_optimizer(optimizer, name_parameters({"m": model}), stored).apply()
    assert optimizer.param_groups[0]["lr"] is held


@pytest.mark.parametrize("kind", CAPTURABLE)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_capturable_run_goes_on_exactly(
    kind: str, foreach: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses capturable on a CPU, though its arithmetic runs there: here the CPU counts as supported."""
    for info in pkgutil.iter_modules(torch.optim.__path__):
        module = importlib.import_module(f"torch.optim.{info.name}")
        if hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    options = {"capturable": True, "foreach": foreach}
    job = Job(kind, options).run(3)
    loaded = [through_disk(tmp_path, job.state) for _ in range(2)]
    job.run(5)
    for steps, components in zip((0, 2), loaded, strict=True):
        other = Job(kind, options, seed=9).run(steps)
        apply_state(other.state, components)
        other.run(5)
        assert same(other.optimizer.state_dict(), job.optimizer.state_dict())
        assert same(dict(other.model.state_dict()), dict(job.model.state_dict()))
        assert same(other.losses, job.losses)
