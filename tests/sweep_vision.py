"""For tests: a small vision job with everything in it that has a state or draws a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import ckptd

SAMPLES, BATCH = 18, 4  # 5 batches an epoch, the last one short
BATCHES = 5


class Pictures(Dataset[tuple[int, Tensor, int]]):
    """Pictures, flipped, shifted and made noisy by Python's, NumPy's, torch's and an own generator."""

    def __init__(self) -> None:
        picked = torch.Generator().manual_seed(5)
        self.pixels = torch.rand(SAMPLES, 1, 6, 6, generator=picked)
        self.labels = torch.randint(3, (SAMPLES,), generator=picked).tolist()
        self.rng = np.random.default_rng(random.randrange(10**6))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        picture = self.pixels[index]
        if random.random() < 0.5:
            picture = picture.flip(-1)
        picture = picture.roll(int(np.random.randint(3)), -2) + 0.1 * torch.randn(1, 6, 6)
        return index, picture * float(self.rng.uniform(0.9, 1.1)), self.labels[index]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


class VisionJob:
    """AdamW over two groups, OneCycle, GradScaler that overflows now and then, EMA with buffers, clipping."""

    def __init__(self, steps: int, **loading: Any) -> None:
        model = make_model()
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.01)
        own = torch.Generator().manual_seed(random.randrange(10**6))
        loader = DataLoader(Pictures(), BATCH, shuffle=True, generator=own, **loading)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**121, growth_interval=2),
            "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True),
            "loader": ckptd.ResumableLoader(loader),
            "train": ckptd.TrainState(),
            "noise": {"numpy": np.random.default_rng(3), "torch": torch.Generator().manual_seed(4)},
        }

    def run(self, until: str, after: Callable[[str, Any], None]) -> None:
        loader, counters = self.state["loader"], self.state["train"]
        while True:
            for ids, pictures, labels in loader:
                loss = self._step(pictures, labels)
                counters.step += 1
                counters.epoch, counters.batch_in_epoch = loader.epoch, loader.batch_in_epoch
                counters.losses.append(loss)
                after(str(counters.step), (loss, ids.tolist(), self.state["scheduler"].get_last_lr()))
                if str(counters.step) == until:
                    return
            after(f"{counters.step} edge", None)
            if f"{counters.step} edge" == until:
                return

    def _step(self, pictures: Tensor, labels: Tensor) -> float:
        model, optimizer, scaler = (self.state[name] for name in ("model", "optimizer", "scaler"))
        noise = self.state["noise"]
        smoothing = 0.1 * random.random() + 0.1 * float(noise["numpy"].random())
        jitter = torch.rand((), generator=noise["torch"]) * float(np.random.random())
        loss = nn.functional.cross_entropy(model(pictures + jitter), labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        scaler.scale(20 * loss).backward()  # overflows now and then
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        self.state["scheduler"].step()
        self.state["ema"].update_parameters(model)
        return loss.item()
