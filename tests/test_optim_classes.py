"""Every optimizer class of the installed torch, with every option it takes, goes on exactly after a resume."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.errors import StateMismatch
from ckptd.tensors.capture import capture
from ckptd.tensors.restoring import apply_state
from optimizer_kinds import CLASSES, OPTIONS, Job, cases, runs, shown
from round_trip import same, through_disk

CUT, END = 3, 6
CASES = list(cases())
RUNNING = [(kind, options) for kind, options in CASES if runs(kind, options)]
IDS = [shown(kind, options) for kind, options in RUNNING]
each_case = pytest.mark.parametrize(("kind", "options"), RUNNING, ids=IDS)


@cache
def uninterrupted(name: str) -> Job:
    return Job(*RUNNING[IDS.index(name)]).run(END)


def whole(job: Job) -> dict[str, Any]:
    """Everything that must be equal, bit for bit: types, dtypes and the order of keys too."""
    return {
        "model": dict(job.model.state_dict()),
        "optimizer": detached(job.optimizer.state_dict()),
        "losses": job.losses,
    }


def detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(detached(item) for item in value)
    return value


def test_every_class_of_torch_runs_here_at_least_as_it_is() -> None:
    assert {kind for kind, options in RUNNING if not options} == set(CLASSES)


def test_what_doesnt_run_on_a_cpu_is_capturable_and_nothing_else() -> None:
    left_out = [options for kind, options in CASES if (kind, options) not in RUNNING]
    assert [options for options in left_out if "capturable" not in options] == []


def test_every_switch_that_a_class_has_is_among_the_options_tried() -> None:
    plain = {
        "params", "self", "eps", "rho", "lambd", "alpha", "t0", "dampening", "beta2_decay", "d", "etas",
        "step_sizes", "momentum_decay", "max_iter", "max_eval", "tolerance_grad", "tolerance_change",
        "history_size", "ns_coefficients", "ns_steps",
    }  # fmt: skip
    unknown = {
        f"{name}({option})"
        for name, kind in CLASSES.items()
        for option in inspect.signature(kind.__init__).parameters
        if option not in plain and option not in OPTIONS
    }
    assert not unknown, "torch has new options: add them to OPTIONS, or to the numbers above"


@each_case
def test_a_run_goes_on_bit_for_bit_in_a_job_that_never_stepped_and_in_one_that_did(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(kind, options).run(CUT)
    loaded = [through_disk(tmp_path, job.state) for _ in range(2)]
    for steps, components in zip((0, 2), loaded, strict=True):
        other = Job(kind, options, seed=99).run(steps)
        apply_state(other.state, components)
        assert same(whole(other), whole(job)), f"restored after {steps} steps"
        other.run(END)
        assert same(whole(other), whole(uninterrupted(shown(kind, options))))
    job.run(END)
    assert same(whole(job), whole(uninterrupted(shown(kind, options))))  # the snapshot changed nothing


@each_case
def test_a_snapshot_before_the_first_step_brings_back_the_state_of_then(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    components = through_disk(tmp_path, Job(kind, options).state)
    other = Job(kind, options, seed=99).run(2)
    apply_state(other.state, components)
    assert same(whole(other), whole(Job(kind, options)))
    assert same(whole(other.run(END)), whole(uninterrupted(shown(kind, options))))


@pytest.mark.parametrize("kind", CLASSES)
def test_the_captured_state_holds_no_graph_and_shares_nothing_that_would_come_apart(kind: str) -> None:
    job = Job(kind).run(2)
    captured = capture(job.state)
    assert all(source.grad_fn is None for source in captured.sources)


@pytest.mark.parametrize("kind", sorted(CLASSES.keys() - {"LBFGS"}))
def test_parameters_in_another_order_and_group_order_are_matched_by_name(kind: str, tmp_path: Path) -> None:
    def build(seed: int, turned: bool) -> Job:
        job = Job(kind, seed=seed)
        names = sorted((name for name, _ in job.model.named_parameters()), reverse=turned)
        parameters = dict(job.model.named_parameters())
        job.optimizer = CLASSES[kind]([parameters[name] for name in names], lr=0.05)
        return job

    loaded = through_disk(tmp_path, build(0, False).run(CUT).state)
    other = build(99, True)
    apply_state(other.state, loaded)
    other.run(END)
    straight = build(0, False).run(END)
    assert same(dict(other.model.state_dict()), dict(straight.model.state_dict()))
    assert same(other.losses, straight.losses)
    for (name, mine), theirs in zip(other.model.named_parameters(), straight.model.parameters(), strict=True):
        assert same(other.optimizer.state[mine], straight.optimizer.state[theirs]), name


def test_lbfgs_over_parameters_in_another_order_is_refused_before_anything_changes(tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, Job("LBFGS").run(CUT).state)
    other = Job("LBFGS", seed=99)
    other.optimizer = torch.optim.LBFGS(list(other.model.parameters())[::-1])
    before = whole(other)["model"]
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(StateMismatch, match="one vector over all parameters, and they are in another order"):
        apply_state(other.state, loaded)
    assert same(whole(other)["model"], before)
    assert not other.optimizer.state
