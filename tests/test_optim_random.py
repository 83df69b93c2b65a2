"""Any optimizer over any parameters in any groups comes back as it was, through capture and the archive."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.restoring import apply_state
from optimizer_kinds import CLASSES
from round_trip import LAYOUTS, same, through_disk

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
#: Classes that want something of their parameters or gradients that random ones don't have.
FILLED = st.lists(st.integers(1, 3), max_size=3).map(tuple)
MATRICES = st.tuples(st.integers(1, 3), st.integers(1, 3))
LIMITS = {
    "Muon": MATRICES,
    "SparseAdam": MATRICES,
    "Adafactor": FILLED,  # divides by the number of elements
    "LBFGS": FILLED,
}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(CLASSES)))
    shapes = LIMITS.get(kind, SHAPES)
    dtypes = st.just(torch.float32) if kind == "LBFGS" else st.sampled_from(DTYPES)
    if kind == "Adafactor":  # the dtype of a group's first parameter decides its epsilon: with it, the order
        dtypes = st.just(draw(dtypes))
    count = draw(st.integers(1, 5))
    return {
        "kind": kind,
        "shapes": [draw(shapes) for _ in range(count)],
        "dtypes": [draw(dtypes) for _ in range(count)],
        "frozen": [draw(st.booleans()) for _ in range(count)],
        "group": [0 if kind == "LBFGS" else draw(st.integers(0, 2)) for _ in range(count)],
        "lrs": [draw(st.sampled_from([0.01, 0.5, 1e-8])) for _ in range(3)],
        "orders": [draw(st.permutations(range(count))) for _ in range(2)],
        "cut": draw(st.integers(0, 3)),
        "stepped": draw(st.integers(0, 2)),
        "thaw": draw(st.booleans()),
        "named": draw(st.booleans()),
        "sharding": draw(st.sampled_from(LAYOUTS)),
    }


class Model(nn.Module):
    def __init__(self, job: dict[str, Any], order: list[int]) -> None:
        super().__init__()
        for number in order:
            value = torch.full(job["shapes"][number], 0.5 + number, dtype=job["dtypes"][number])
            self.register_parameter(f"p{number}", nn.Parameter(value, not job["frozen"][number]))

    def at(self, number: int) -> nn.Parameter:
        return self.get_parameter(f"p{number}")


def build(job: dict[str, Any], order: list[int]) -> tuple[Model, torch.optim.Optimizer]:
    if job["kind"] == "LBFGS":
        order = job["orders"][0]  # another order is refused
    model = Model(job, order)
    groups: list[dict[str, Any]] = []
    for number in sorted(set(job["group"])):
        members = [n for n in order if job["group"][n] == number]
        parameters = (
            [(f"n{n}", model.at(n)) for n in members] if job["named"] else [model.at(n) for n in members]
        )
        groups.append({"params": parameters, "lr": job["lrs"][number]})
    if job["kind"] == "LBFGS":
        return model, torch.optim.LBFGS(groups[0]["params"], lr=groups[0]["lr"], max_iter=2)
    return model, CLASSES[job["kind"]](groups)


def step(job: dict[str, Any], model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    for index in range(len(job["shapes"])):
        parameter = model.at(index)
        if job["frozen"][index] and not (job["thaw"] and number >= 2):
            continue
        generator = torch.Generator().manual_seed(number * 10 + index)
        gradient = torch.rand(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.requires_grad_(True)
        parameter.grad = gradient.to_sparse() if job["kind"] == "SparseAdam" else gradient
    optimizer.step(lambda: 1.0)  # type: ignore[arg-type, return-value]


def by_name(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return dict(sorted(found.items()))


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_any_optimizer_goes_on_exactly_in_another_order_and_over_whatever_was_there(
    job: dict[str, Any],
) -> None:
    model, optimizer = build(job, job["orders"][0])
    other, fresh = build(job, job["orders"][1])
    for number in range(job["cut"]):
        step(job, model, optimizer, number)
    for number in range(job["stepped"]):
        step(job, other, fresh, number + 7)
    with tempfile.TemporaryDirectory() as folder:
        sharding: Sharding = job["sharding"]
        loaded = through_disk(Path(folder), {"model": model, "optimizer": optimizer}, sharding)
    apply_state({"model": other, "optimizer": fresh}, loaded)
    for number in range(job["cut"], job["cut"] + 3):
        assert same(by_name(other, fresh), by_name(model, optimizer))
        for mine, theirs in zip(fresh.param_groups, optimizer.param_groups, strict=True):
            kept = [
                {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in (mine, theirs)
            ]
            assert same(*kept)
        values = (dict(sorted(each.state_dict().items())) for each in (other, model))
        assert same(*values)
        step(job, model, optimizer, number)
        step(job, other, fresh, number)
