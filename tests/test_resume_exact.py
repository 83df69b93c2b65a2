"""Field case 21: a run cut after any step and resumed from its checkpoint is the uninterrupted run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ckptd
from ckptd.tensors.restoring import apply_state

STEPS = 20
SAMPLES, BATCH = 14, 3  # 5 batches an epoch, the last one short: 20 steps are 4 epochs


class Noisy(Dataset[tuple[int, Tensor]]):
    """Samples that draw from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = torch.rand(6) + random.random() + float(np.random.random())
        return index, noise * (index + 1) / SAMPLES


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.01)
    loader = DataLoader(Noisy(), BATCH, shuffle=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        "loader": ckptd.ResumableLoader(loader),
        "train": ckptd.TrainState(),
    }


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def train(state: dict[str, Any], upto: int, *, after: Callable[[int], None] | None = None) -> Iterator[Any]:
    """Train to step `upto`; yields what a step shows: loss, sample ids, learning rate."""
    model, optimizer, scheduler, loader, counters = state.values()
    while counters.step < upto:
        for ids, inputs in loader:
            label_noise = random.random() * float(np.random.random())
            loss = (model(inputs) - label_noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            lr = scheduler.get_last_lr()
            optimizer.step()
            scheduler.step()
            counters.step += 1
            counters.epoch, counters.batch_in_epoch = loader.epoch, loader.batch_in_epoch
            counters.losses.append(loss.item())
            yield loss.item(), ids.tolist(), lr
            if after is not None:
                after(counters.step)
            if counters.step == upto:
                return


def next_draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def resume(folder: Path) -> dict[str, Any]:
    """A new process as far as the state can tell: other seeds, everything made anew, then restored."""
    seed(12345)
    state = build()
    next_draws()
    apply_state(state, ckptd.load(folder))
    return state


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [ckptd.Sharding(), ckptd.Sharding(shards=2)], ids=["single", "sharded"])
def test_a_run_cut_after_any_step_is_the_uninterrupted_run(tmp_path: Path, sharding: ckptd.Sharding) -> None:
    seed(1)
    state = build()
    ckptd.save(tmp_path / "0", state, step=0, sharding=sharding)

    def save(step: int) -> None:
        ckptd.save(tmp_path / str(step), state, step=step, sharding=sharding)

    whole = list(train(state, STEPS, after=save))
    draws = next_draws()
    for cut in range(STEPS + 1):
        resumed = resume(tmp_path / str(cut))
        assert list(train(resumed, STEPS)) == whole[cut:], f"cut after step {cut}"
        assert resumed["train"].losses == [loss for loss, *_ in whole]
        assert next_draws() == draws, f"cut after step {cut}"


def test_a_run_cut_twice_in_one_epoch_is_the_uninterrupted_run(tmp_path: Path) -> None:
    seed(1)
    whole = list(train(build(), STEPS))
    draws = next_draws()
    seed(1)
    state = build()
    seen = list(train(state, 16))
    for name, upto in (("first", 18), ("second", STEPS)):
        ckptd.save(tmp_path / name, state, step=state["train"].step)
        state = resume(tmp_path / name)
        seen += train(state, upto)
    assert (seen, next_draws()) == (whole, draws)
