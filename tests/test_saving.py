from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptd
from ckptd.errors import InvalidArgument, UnstorableState
from ckptd.format.records import read_index
from ckptd.snapshot.descriptor import Sharding


def test_the_folder_holds_what_the_design_says(tmp_path: Path) -> None:
    state = {"model": {"w.weight": torch.ones(3), "w.bias": torch.ones(2)}, "n": 1}
    single = ckptd.save(tmp_path / "deep" / "single", state, step=3)
    assert sorted(os.listdir(single)) == ["ckpt.pt", "index.json", "tensors.json"]
    assert torch.load(single / "ckpt.pt", weights_only=True)["model"]["w.bias"].tolist() == [1, 1]
    sharded = ckptd.save(tmp_path / "sharded", state, step=3, sharding=Sharding(by="param-group"))
    # under 64 MiB "auto" is one file, whatever the order of the shards would be
    assert sorted(os.listdir(sharded)) == ["ckpt.pt", "index.json", "tensors.json"]
    three = ckptd.save(tmp_path / "three", state, step=3, sharding=Sharding(by="param-group", shards=3))
    merged: dict[str, torch.Tensor] = {}
    for file in three.glob("model.shard-*.pt"):
        merged.update(torch.load(file, weights_only=True)["tensors"])
    assert sorted(merged) == ["w.bias", "w.weight"]


def test_it_passes_verification(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "c", {"a": torch.ones(3)}, step=0)
    assert ckptd.verify(path).ok


def test_metrics_and_versions_are_in_the_index(tmp_path: Path) -> None:
    metrics = {"a": float("nan"), "b": np.float32(1.5), "c": torch.tensor(2.0), "d": float("-inf"), "e": 3}
    path = ckptd.save(tmp_path / "c", {"a": 1}, step=2, metrics=metrics)
    index = read_index(path)
    assert repr(sorted(index.metrics.items())) == repr(
        [("a", float("nan")), ("b", 1.5), ("c", 2.0), ("d", float("-inf")), ("e", 3.0)]
    )
    json.loads((path / "index.json").read_text(), parse_constant=pytest.fail)
    assert {"ckptd", "torch", "numpy", "python"} <= set(index.versions)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_bad_step_is_refused_and_nothing_is_written(tmp_path: Path, step: object) -> None:
    with pytest.raises(InvalidArgument):
        ckptd.save(tmp_path / "c", {"a": 1}, step=step)  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)


def test_an_existing_path_is_refused_and_untouched(tmp_path: Path) -> None:
    path = ckptd.save(tmp_path / "c", {"a": 1}, step=2)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(InvalidArgument):
        ckptd.save(path, {"a": 2}, step=3)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(tmp_path) == ["c"]


def test_a_state_that_cant_be_stored_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnstorableState):
        ckptd.save(tmp_path / "c", {"a": object()}, step=2)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("below", ["x", "x/y"])
def test_a_path_below_a_file_is_refused_as_such(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(InvalidArgument, match="a file, not a folder; pick another path"):
        ckptd.save(tmp_path / "file" / below, {"a": 1}, step=2)
    assert (tmp_path / "file").read_bytes() == b"mine" and os.listdir(tmp_path) == ["file"]
