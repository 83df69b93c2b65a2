"""Jobs that resume bit for bit, for check_resume: everything that counts is in their state."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import ckptd

SAMPLES, BATCH = 14, 3  # 5 batches an epoch, the last one short


class Noisy(Dataset[Tensor]):
    """Samples that are augmented with draws from all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(4) + random.random() + float(np.random.random()) * index / SAMPLES


def seed() -> None:
    torch.set_num_threads(1)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def build() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        "loader": ckptd.ResumableLoader(DataLoader(Noisy(), BATCH, shuffle=True)),
        "train": ckptd.TrainState(),
    }


def one_step(state: dict[str, Any], batch: Tensor) -> Tensor:
    loss: Tensor = (state["model"](batch) - random.random()).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    return loss


def train(state: dict[str, Any]) -> Iterator[Tensor]:
    while True:
        for batch in state["loader"]:
            loss = one_step(state, batch)
            state["train"].step += 1
            state["train"].losses.append(loss.item())
            yield loss


def make_job() -> tuple[dict[str, Any], Iterator[Any]]:
    seed()
    state = build()
    return state, train(state)


def say_pid(_worker: int) -> None:
    print(f"pid {os.getpid()}", flush=True)


def with_workers() -> tuple[dict[str, Any], Iterator[Any]]:
    say_pid(0)
    seed()
    state = build()
    loader = DataLoader(Noisy(), BATCH, shuffle=True, num_workers=1, worker_init_fn=say_pid)
    state["loader"] = ckptd.ResumableLoader(loader)
    return state, train(state)
