"""A state with a value of every kind in it, and what training does to it."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ckptd


class Live:
    """Gives its own lists and dicts away, as many a state_dict() does."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "seen": [1, 2],
            "by": {"a": [3.0]},
            "t": torch.ones(2),
            "a": np.zeros(3),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def job() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "live": Live(), "losses": [0.5] * 100, "short": [1, [2, {"x": 3}]], "counters": {"n": 1, "epoch": [0]},
        "deque": deque([1, [2]]), "set": {1, 2}, "bytes": bytearray(b"abc"), "array": np.arange(6.0)[::2],
        "shared": torch.arange(4).share_memory_(), "generator": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(1), "strided": torch.arange(12.0)[::3],
    }  # fmt: skip


def train_on(state: dict[str, Any]) -> None:
    """Changes everything in place, and then the dict itself."""
    model, optimizer = state["model"], state["optimizer"]
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 99.0
    optimizer.zero_grad(set_to_none=True)
    state["scheduler"].step()
    live = state["live"].state
    live["seen"].append(99)
    live["by"]["a"][0] = 99.0
    live["t"].fill_(99)
    live["a"][:] = 99
    state["losses"][:] = [99.0]
    state["short"][1][1]["x"] = 99
    state["counters"]["epoch"].append(99)
    state["counters"]["n"] += 99
    state["deque"][1].append(99)
    state["set"].add(99)
    state["bytes"][0] = 99
    state["array"][:] = 99
    state["shared"].fill_(99)
    state["strided"].fill_(99)
    torch.rand(1, generator=state["generator"])
    state["numpy"].random()
    torch.rand(1)
    np.random.rand()
    del state["short"]
    state["more"] = 99


def contents(path: Path | None) -> dict[str, Any]:
    assert path is not None
    loaded = ckptd.load(path)
    return {name: plain(value) for name, value in loaded.items()}


def plain(value: Any) -> Any:
    """Generators as what they draw next, so that they can be compared."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value


def weights(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "at": [step]}


def assert_whole(path: Path | None, step: int) -> None:
    assert path is not None
    loaded = ckptd.load(path)
    assert loaded["w"].unique().tolist() == [step] and loaded["at"] == [step]
