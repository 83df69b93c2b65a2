"""What a restore costs beside its bytes: what it does once, and not for each tensor or number."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.tensors.registered_tags import branches_below
from ckptd.tensors.restoring import apply_state


def test_no_collection_begins_while_a_restore_is_planned_and_written() -> None:
    began: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        began.append(phase)

    class Asks:
        """Loaded before anything else: what is noted comes from the planning."""

        noted = -1

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.noted = len(began)

    def tensors() -> list[torch.Tensor]:
        return [torch.zeros(1) for _ in range(3000)]

    live, asks, stored = tensors(), Asks(), {"tensors": tensors(), "asks": {"n": 1}}
    gc.collect()
    gc.callbacks.append(note)
    try:
        apply_state({"tensors": live, "asks": asks}, stored, only=["tensors", "asks"])
    finally:
        gc.callbacks.remove(note)
    assert asks.noted == 0
    assert gc.isenabled()


def test_a_history_of_numbers_is_passed_over_in_one_go() -> None:
    tensor = torch.zeros(1)
    assert branches_below([0.5, 1, None, "a"]) == branches_below(deque([1.0])) == ()
    assert list(branches_below([0.5, tensor, True])) == [(1, tensor)]
    assert list(branches_below({"a": 1, "b": [2]})) == [("b", [2])]


def test_a_module_whose_tensors_were_all_read_in_place_is_not_loaded_name_by_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        return {"model": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))}

    def load_state_dict(self: nn.Module, *args: Any, **options: Any) -> Any:
        loads.append(self)
        return real(self, *args, **options)

    loads: list[nn.Module] = []
    real, first, second = nn.Module.load_state_dict, make(1), make(2)
    with ckptd.Client(tmp_path / "root", daemon="off", sharding=ckptd.Sharding(shards=1)) as client:
        client.snapshot(1, first)
    monkeypatch.setattr(nn.Module, "load_state_dict", load_state_dict)
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        client.restore(second)
    assert not loads
    for one, other in zip(
        first["model"].state_dict().values(), second["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_module_without_tensors_is_loaded_all_the_same() -> None:
    model, loaded = nn.ReLU(), []
    model.register_load_state_dict_post_hook(lambda module, _: loaded.append(module))
    apply_state({"model": model}, {"model": {}}, only=["model"])
    assert loaded == [model]
