"""Field cases 21, 23 and 25: a run cut at any step and resumed from disk goes on bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

from ckptd import ResumableLoader, Sharding, TrainState, load, save
from ckptd.tensors.restoring import apply_state

STEPS = 20
BATCHES = 5  # an epoch: cuts fall inside, on its last batch and on its edge

Schedule = Callable[[torch.optim.Optimizer], Any]


class Noisy(Dataset[Any]):
    """Every item draws from all three generators."""

    def __len__(self) -> int:
        return 3 * BATCHES

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(np.random.normal()) + float(torch.randn(()))
        return index, torch.full((4,), float(index) / 10 + noise / 100)


class Run:
    """A small training script: dropout, norm, clipping, EMA, two groups, a schedule, a shuffled loader."""

    def __init__(self, seed: int, schedule: Schedule) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.05
        )
        self.scheduler = schedule(self.optimizer)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.loader = ResumableLoader(DataLoader(Noisy(), 3, shuffle=True))
        self.train = TrainState()
        self.trace: list[Any] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "ema": self.ema,
            "loader": self.loader,
            "train": self.train,
        }

    def go_to(self, last: int) -> None:
        while self.train.step < last:
            for ids, batch in self.loader:
                self.one_step(ids, batch)
                if self.train.step == last:
                    return

    def one_step(self, ids: torch.Tensor, batch: torch.Tensor) -> None:
        loss = self.model(batch + random.random() / 100).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss.item())
        else:
            self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.train.step += 1
        self.train.losses.append(loss.item())
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.trace.append((loss.item(), ids.tolist(), lrs))

    def last_draws(self) -> Any:
        weights = [p.tolist() for p in (*self.model.parameters(), *self.ema.parameters())]
        draws = (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.randn(2).tolist(),
        )
        return weights, draws, self.train.losses


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def resumed(folder: Path, first: Run, step: int, schedule: Schedule, sharding: Sharding) -> Run:
    path = save(folder / f"{step}-{len(list(folder.iterdir()))}", first.state, step=step, sharding=sharding)
    second = Run(1000 + step, schedule)
    second.optimizer.zero_grad()
    apply_state(second.state, load(path))
    return second


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def baseline(schedule: Schedule) -> tuple[list[Any], Any]:
    run = Run(3, schedule)
    run.go_to(STEPS)
    return run.trace, run.last_draws()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(shards=2)], ids=["single", "sharded"])
def test_a_run_cut_at_any_step_goes_on_bit_for_bit(tmp_path: Path, sharding: Sharding) -> None:
    trace, end = baseline(cosine)
    for cut in range(1, STEPS):
        first = Run(3, cosine)
        first.go_to(cut)
        second = resumed(tmp_path, first, cut, cosine, sharding)
        second.go_to(STEPS)
        assert first.trace + second.trace == trace, cut
        assert second.last_draws() == end, cut


def test_a_run_cut_twice_in_one_epoch_and_again_later_goes_on_bit_for_bit(tmp_path: Path) -> None:
    trace, end = baseline(cosine)
    run, seen = Run(3, cosine), []
    for cut in (6, 8, 9, 10, 15):
        run.go_to(cut)
        seen += run.trace
        run = resumed(tmp_path, run, cut, cosine, Sharding())
    run.go_to(STEPS)
    assert seen + run.trace == trace
    assert run.last_draws() == end


def test_saving_at_every_step_changes_nothing(tmp_path: Path) -> None:
    trace, end = baseline(cosine)
    run = Run(3, cosine)
    for step in range(1, STEPS + 1):
        for ids, batch in run.loader if step == 1 else ():
            run.one_step(ids, batch)
            save(tmp_path / str(run.train.step), run.state, step=run.train.step)
    while run.train.step < STEPS:
        for ids, batch in run.loader:
            run.one_step(ids, batch)
            save(tmp_path / str(run.train.step), run.state, step=run.train.step)
    assert run.trace == trace
    assert run.last_draws() == end


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    )


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULES: dict[str, Schedule] = {
    "Step": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 11]),
    "Cosine": cosine,
    "WarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=STEPS + 5),
    "Cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "Polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "Sequential": sequential,
    "Chained": chained,
    "Lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "Multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "Plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, threshold=0.5),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # by SequentialLR itself in torch 2.6
@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_with_the_same_rates(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name]
    trace, end = baseline(schedule)
    for cut in (1, 4, 5, 7, 12, 19):
        first = Run(3, schedule)
        first.go_to(cut)
        second = resumed(tmp_path, first, cut, schedule, Sharding())
        second.go_to(STEPS)
        assert first.trace + second.trace == trace, cut
        assert second.last_draws() == end, cut


def test_a_grad_scaler_goes_on(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    path = save(tmp_path / "c", {"scaler": scaler}, step=3)
    fresh = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    apply_state({"scaler": fresh}, load(path))
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 16.0
