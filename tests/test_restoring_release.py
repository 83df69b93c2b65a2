"""A restore keeps nothing of the state alive: an old model would hold its memory, and a loader's workers would end late."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckptd
from ckptd.errors import StateMismatch


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def build() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return {
        "model": model, "optimizer": optimizer, "ema": torch.optim.swa_utils.AveragedModel(model),
        "loader": ckptd.ResumableLoader(DataLoader(list(range(8)), batch_size=2)),
        "best": {"w": model.state_dict()}, "losses": [torch.ones(1)], "train": ckptd.TrainState(),
    }  # fmt: skip


def seen(state: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
    return {name: weakref.ref(value) for name, value in state.items() if hasattr(value, "__dict__")}


def alive(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, ref in refs.items() if ref() is not None]


@pytest.mark.parametrize("strict", [True, False])
def test_what_was_restored_is_gone_when_its_owner_lets_go(
    tmp_path: Path, no_collection: None, strict: bool
) -> None:
    with ckptd.Client(tmp_path, daemon="off") as client:
        client.snapshot(1, build())
        state = build()
        client.restore(state, strict=strict)
        refs = seen(state)
        state.clear()
        assert alive(refs) == []


def test_what_refused_to_be_restored_is_gone_too(tmp_path: Path, no_collection: None) -> None:
    with ckptd.Client(tmp_path, daemon="off") as client:
        client.snapshot(1, build())
        state = build() | {"more": nn.Linear(1, 1)}
        with pytest.raises(StateMismatch):
            client.restore(state)
        refs = seen(state)
        state.clear()
        assert alive(refs) == []
