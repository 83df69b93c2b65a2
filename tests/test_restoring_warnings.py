"""Where warnings are errors a restore is done whole or not at all: none is raised while it writes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.disk.series import read_series
from ckptd.errors import CheckpointWarning
from ckptd.names import DEFAULT_RUN
from ckptd.tensors.restoring import apply_state
from ckptd.tensors.tag_reader import GeneratorElsewhere
from round_trip import same


class Renamed(torch.optim.SGD):
    pass


def made(
    *,
    workers: int = 0,
    lr: Any = 0.1,
    kind: Any = torch.optim.SGD,
    dtype: torch.dtype = torch.float32,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", torch.zeros(2, dtype=dtype))
    optimizer = kind(model.parameters(), lr=deepcopy(lr), momentum=0.9)
    return {
        "data": {"n": 1, **(more or {})},
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loader": ckptd.ResumableLoader(
            DataLoader(list(range(20)), batch_size=2, shuffle=True, num_workers=workers)
        ),
        "draws": np.random.default_rng(1),
        "optimizer": optimizer,
        "model": model,
    }


def trained(state: dict[str, Any], steps: int) -> None:
    batches = iter(state["loader"])
    for _ in range(steps):
        next(batches)
        state["draws"].random()
        state["model"](torch.ones(2)).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["data"]["n"] += 1


def seen(state: dict[str, Any]) -> dict[str, Any]:
    values = {name: state[name].state_dict() for name in ("scheduler", "loader", "optimizer", "model")}
    return deepcopy({**values, "data": state["data"], "draws": state["draws"].bit_generator.state})


@contextmanager
def of_a_gpu() -> Iterator[None]:
    """Saved where there is a GPU."""
    states = [torch.zeros(16, dtype=torch.uint8)]
    with (
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "get_rng_state_all", lambda: states),
    ):
        yield


@contextmanager
def of_old_numpy() -> Iterator[None]:
    with (
        mock.patch("ckptd.tensors.generator_state.continue_spawning", lambda *_: False),
        mock.patch("ckptd.loop.loader_rng.continue_spawning", lambda *_: False),
    ):
        yield


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


Case = tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "number of loader workers": (as_it_is, as_it_is, {}, {"workers": 1}),
    "entry of data": (as_it_is, as_it_is, {}, {"more": {"new": 1}}),
    "rate": (as_it_is, as_it_is, {}, {"lr": torch.tensor(0.7)}),
    "class": (as_it_is, as_it_is, {}, {"kind": Renamed}),
    "devices": (of_a_gpu, as_it_is, {}, {}),
    "children": (as_it_is, of_old_numpy, {}, {}),
    "imaginary part": (as_it_is, as_it_is, {"dtype": torch.complex64}, {}),
}


def restored(root: Path, live: dict[str, Any], case: str, action: Any) -> list[int]:
    """The steps on the line once live was restored from step 1 and saved again."""
    with ckptd.Client(root, daemon="off") as client, CASES[case][1]():
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            if action == "error":
                with pytest.raises(CheckpointWarning):
                    client.restore(live, step=1, strict=case != "imaginary part")
            else:
                client.restore(live, step=1, strict=case != "imaginary part")
        client.snapshot(9, {"data": 1})
    entries = read_series(Root.for_reading(root), DEFAULT_RUN).entries
    return [entry.step for entry in entries if entry.on_line]


@pytest.mark.parametrize("case", CASES)
def test_a_warning_that_is_an_error_leaves_the_state_untouched_or_wholly_restored(
    case: str, tmp_path: Path
) -> None:
    saving, _, saved, live = CASES[case]
    for root in (tmp_path / "said", tmp_path / "raised"):
        torch.manual_seed(0)
        with ckptd.Client(root, daemon="off") as client, saving():
            state = made(**saved)
            for step in (1, 2):
                trained(state, step)
                client.snapshot(step, state)
    said, raised = made(**live), made(**live)
    raised["model"].load_state_dict(said["model"].state_dict())
    untouched = seen(raised)
    assert restored(tmp_path / "said", said, case, "ignore") == [1, 9]
    line = restored(tmp_path / "raised", raised, case, "error")
    now = seen(raised)
    assert same(now, seen(said) if line == [1, 9] else untouched)
    assert line in ([1, 9], [1, 2, 9])


def test_a_loader_set_by_itself_is_set_whole_too(tmp_path: Path) -> None:
    state, live = made(), made(workers=1)
    trained(state, 3)
    with pytest.raises(CheckpointWarning, match="num_workers"):
        live["loader"].load_state_dict(state["loader"].state_dict())
    assert live["loader"].batch_in_epoch == 3


def test_a_generator_of_a_device_that_isnt_here_is_said_before_anything_is_written() -> None:
    live = {"n": [1], "draws": np.random.default_rng(1)}
    with pytest.raises(CheckpointWarning, match=r"\['draws'\]: the checkpoint holds a generator of cuda:0"):
        apply_state(live, {"n": [2], "draws": GeneratorElsewhere("cuda:0", b"")}, only=["n", "draws"])
    assert live["n"] == [1]


def test_a_warning_of_a_restore_points_at_the_callers_line(tmp_path: Path) -> None:
    with ckptd.Client(tmp_path, daemon="off") as client:
        trained(state := made(), 1)
        client.snapshot(1, state)
    live = made(workers=1, more={"new": 1})
    with ckptd.Client(tmp_path, daemon="off") as client, pytest.warns(CheckpointWarning) as said:
        client.restore(live)
    assert len(said) == 2
    assert {one.filename for one in said} == {__file__}


def test_an_imaginary_part_is_said_by_name_and_torch_says_nothing_in_between(tmp_path: Path) -> None:
    """In a process of its own: torch says it once."""
    job = """
import sys, warnings, torch
from ckptd.tensors.restoring import apply_state
warnings.simplefilter("error")
warnings.filterwarnings("default", "state")
live, stored = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, dtype=torch.complex64)
apply_state({"m": live}, {"m": stored.state_dict()}, strict=False, only=["m"])
assert torch.equal(live.weight, stored.weight.real)
"""
    done = subprocess.run(
        [sys.executable, "-c", job], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("weight", "bias"):
        assert f"state['m']['{name}'] is torch.complex64 in the checkpoint, live torch.float32" in done.stderr
