"""Slots are made before the first optimizer step, and large enough for what it adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import needed_bytes
from ckptd.tensors.capture import capture
from ckptd.tensors.foreseeing import foresee
from optimizer_kinds import Job, cases, runs, shown

MIB = 1024 * 1024


def needed(state: dict[str, Any]) -> int:
    """Bytes of a slot that a snapshot of the state takes now."""
    captured = capture(state)
    described = Descriptor(
        run="r", client_id="0" * 32, snapshot=1, step=1, saved_at=1.0, run_seconds=1.0, base_sequence=None,
        state=captured.state, tensors=captured.tensors, data_bytes=captured.data_bytes,
    )  # fmt: skip
    return needed_bytes(captured.data_bytes, len(encode(described)))


#: Their state depends on more than a parameter's size: LBFGS keeps vectors over all of them.
UNFORESEEN = {"LBFGS"}
CASES = [
    case for case in cases() if case[0] not in UNFORESEEN and "differentiable" not in case[1] and runs(*case)
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=[shown(*case) for case in CASES])
def test_what_the_first_steps_of_any_optimizer_add_is_foreseen(kind: str, options: dict[str, Any]) -> None:
    job = Job(kind, options)
    foreseen = foresee(job.state)
    job.run(2)
    assert needed(job.state) <= foreseen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9}), ("AdamW", {}), ("Adam", {"amsgrad": True}), ("RMSprop", {})],
    ids=str,
)
def test_no_more_is_taken_than_torchs_own_optimizers_need(
    kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20))).to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    state = {"model": model, "optimizer": optimizer}
    foreseen = foresee(state)
    model(torch.ones(1, 300, dtype=dtype)).sum().backward()
    optimizer.step()
    assert needed(state) <= foreseen <= needed(state) * 1.02 + MIB // 8
    assert needed(state) <= foresee(state) <= needed(state) * 1.01  # nothing is counted twice


class Unknown(torch.optim.SGD):
    """A class of the user's own: nobody knows what it keeps."""


def test_of_a_class_that_isnt_torchs_own_adams_moments_are_foreseen() -> None:
    model = nn.Linear(500, 500).to(torch.bfloat16)
    state = {"model": model, "optimizer": Unknown(model.parameters(), lr=0.1)}
    assert foresee(state) >= 500 * 501 * (2 + 2 * 4)


def test_parameters_that_arent_trained_get_no_moments() -> None:
    model = nn.Linear(500, 500).requires_grad_(requires_grad=False)
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    assert foresee(state) < 1.1 * 500 * 501 * 4


def test_what_describes_many_tensors_is_foreseen_too() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(4000)])
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    foreseen = foresee(state)
    for parameter in model:
        parameter.grad = torch.ones(1)
    state["optimizer"].step()  # type: ignore[attr-defined]
    assert needed(state) <= foreseen


def test_room_is_made_for_gradients_to_come() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    assert foresee({"model": model, "gradients": ckptd.Gradients(model)}) > 8_000_000
