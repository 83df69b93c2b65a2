"""Field cases 16, 21 and 22 end to end: Client, daemon, SIGKILL in another process, and going on bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ckptd
from ckptd.format.records import read_index
from ckptd_places import end_daemon, places
from fake_daemon import wait_until
from live_daemon import detached
from sweep_process import in_process

__all__ = ["places"]

pytestmark = pytest.mark.slow

STEPS = 20
SAMPLES, BATCH = 14, 3  # 5 batches an epoch, the last one short: 20 steps are 4 epochs


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


class Noisy(Dataset[tuple[int, Tensor]]):
    """Samples that draw from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(6) + random.random() + float(np.random.random()) * (index + 1)


class Noise(nn.Module):
    """A model's own draws, from Python's and NumPy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        return x + random.gauss(0, 0.1) * float(np.random.random())


def build(workers: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 16), Noise(), nn.Dropout(0.3), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(
        Noisy(), BATCH, shuffle=True, num_workers=workers, prefetch_factor=4 if workers else None
    )
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
        "loader": ckptd.ResumableLoader(loader),
        "train": ckptd.TrainState(),
    }


def train(state: dict[str, Any], after: Callable[[int, Any], None]) -> None:
    """To the last step; after(step, what it shows): loss, sample ids, learning rate."""
    model, optimizer, scheduler, loader, counters = state.values()
    while counters.step < STEPS:
        for ids, inputs in loader:
            loss = (model(inputs) - random.random()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            lr = scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
            counters.step += 1
            counters.losses.append(loss.item())
            after(counters.step, [loss.item(), ids.tolist(), lr])
            if counters.step == STEPS:
                return


def next_draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.random()), float(torch.rand(()))]


def trainer(root: Path | None, out: Path, workers: int, kill_after: int) -> None:
    """A training script: saves after each step, and dies of SIGKILL right after snapshot() of one of them."""
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 if root is None or not root.exists() else os.getpid())
    client = ckptd.Client(root) if root is not None else None
    state = build(workers)
    if client is not None:
        client.restore(state)
    with out.open("a", buffering=1) as file:

        def after(step: int, shown: Any) -> None:
            file.write(json.dumps([step, shown]) + "\n")
            if client is not None:
                client.snapshot(step, state)
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

        train(state, after)
        file.write(json.dumps(["end", [next_draws(), state["train"].losses]]) + "\n")
    if client is not None:
        client.close()


CUTS = {
    0: range(1, STEPS),
    2: (1, 4, 5, 8, 9, 16),  # the first, an epoch's last but one and its edge, twice in an epoch, epoch 3
}


@pytest.fixture(scope="module")
def imported() -> None:
    """What torch imports at an optimizer's first step, once for all the processes to come."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.AdamW([parameter]).step()


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_trainer_killed_again_and_again_goes_on_bit_for_bit(
    root: Path, tmp_path: Path, workers: int
) -> None:
    """Field cases 21 and 22: losses, sample ids, learning rates and the next draws, workers 0 and 2, prefetch 4."""
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert in_process(lambda: trainer(None, whole, workers, -1)) == 0
    for at in CUTS[workers]:
        assert in_process(lambda at=at: trainer(root, cut, workers, at)) == -signal.SIGKILL  # type: ignore[misc]
        if at in (5, 9):
            end_daemon(root)  # both die: what is sealed is written by the next one
    assert in_process(lambda: trainer(root, cut, workers, -1)) == 0
    assert cut.read_text().splitlines() == whole.read_text().splitlines()
    latest = ckptd.latest_valid(root)
    assert latest is not None
    assert (latest.step, latest.passed_over) == (STEPS, ())


def test_going_back_and_on_makes_the_new_lower_step_the_latest_and_retention_keeps_it(root: Path) -> None:
    """Field case 16: 100 … 700, restore(step=300), 400 again; keep_last=1 doesn't remove it."""
    state: dict[str, Any] = {"weights": torch.zeros(10), "note": "old"}
    with ckptd.Client(root) as client:
        for step in range(100, 800, 100):
            state["weights"].fill_(step)
            client.snapshot(step, state).wait("verified", timeout_s=30)
            if step == 500:
                before = {path.name for path in (root / "default").glob("step-*")}
    assert before == {f"step-{step:09d}" for step in range(100, 600, 100)}
    end_daemon(root)
    with detached(root, "--keep-last", "1"):
        with ckptd.Client(root, daemon="attach") as client:
            resumed = client.restore(state, step=300)
            assert resumed is not None
            assert (resumed.step, set(state["weights"].tolist())) == (300, {300.0})
            assert client.latest().step == 700  # type: ignore[union-attr]  # going back alone moves nothing
            state["note"] = "new"
            path = client.snapshot(400, state).wait("verified", timeout_s=30).path
            assert path is not None
            assert (read_index(path).parent, read_index(path).lineage) == (3, ((1, 3), (8, 8)))
            assert client.latest().name == "step-000000400.2"  # type: ignore[union-attr]
            wait_until(lambda: [p.name for p in (root / "default").glob("step-*")] == ["step-000000400.2"])
        again: dict[str, Any] = {"weights": torch.zeros(10), "note": ""}
        with ckptd.Client(root, daemon="attach") as client:
            resumed = client.restore(again)
            assert resumed is not None
            assert (resumed.step, again["note"], set(again["weights"].tolist())) == (400, "new", {300.0})
            client.snapshot(500, again).wait("verified", timeout_s=30)
            wait_until(lambda: [p.name for p in (root / "default").glob("step-*")] == ["step-000000500"])
