"""Tied tensors of different components lie in different files: loaded, they are one memory again."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import CorruptCheckpoint
from ckptd.format.records import index_to_bytes, read_index
from ckptd.format.strict_json import compact
from ckptd.limits import MIB
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.loading import load
from ckptd.tensors.saving import save
from round_trip import same

SHARDINGS = [
    *(Sharding(by=by, shards=n) for by in ("size", "round-robin") for n in (1, 2, 3)),  # type: ignore[arg-type]
    Sharding(by="param-group", shards=3),
]
TWO = Sharding(shards=2)


def tied() -> dict[str, Any]:
    weight = nn.Parameter(torch.arange(300.0).view(20, 15))
    turned = torch.arange(12.0).view(3, 4).t()
    return {
        "a": {"w": weight, "other": torch.ones(7), "t": turned},
        "b": [weight.detach(), deque([turned]), weight],
        "bare": weight.detach(),
        5: (turned, weight),  # a name that no file can have: it lies in meta.pt
    }


def same_memory(*tensors: torch.Tensor) -> bool:
    return len({(tensor.data_ptr(), tensor.stride()) for tensor in tensors}) == 1


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_ties_across_components_are_one_memory_after_the_load(sharding: Sharding, tmp_path: Path) -> None:
    state = tied()
    loaded = load(save(tmp_path / "c", state, step=1, sharding=sharding, rng=False))
    assert same(loaded, state)
    a, b, five = loaded["a"], loaded["b"], loaded[5]  # type: ignore[index]
    assert same_memory(a["w"], b[0], b[2], loaded["bare"], five[1])
    assert same_memory(a["t"], b[1][0], five[0])
    a["w"].data[0, 0] = 99.0
    assert b[0][0, 0] == five[1][0, 0] == 99.0


def test_a_small_component_in_meta_is_tied_to_the_large_one_in_its_shards(tmp_path: Path) -> None:
    model = {"large": torch.zeros(65 * MIB, dtype=torch.uint8), "small": torch.arange(5)}
    path = save(tmp_path / "c", {"head": [model["small"]], "model": model}, step=1)
    assert not list(path.glob("head*"))
    assert list(path.glob("model.shard*"))
    loaded = load(path)
    assert same_memory(loaded["head"][0], loaded["model"]["small"])


def test_each_of_tied_tensors_keeps_its_own_kind(tmp_path: Path) -> None:
    memory = torch.ones(3)
    state = {
        "p": {"w": nn.Parameter(memory)},
        "frozen": {"w": nn.Parameter(memory, requires_grad=False)},
        "grad": {"w": memory.detach().requires_grad_()},
        "plain": {"w": memory},
    }
    loaded = load(save(tmp_path / "c", state, step=1, sharding=TWO, rng=False))
    assert same(loaded, state)
    assert same_memory(*(component["w"] for component in loaded.values()))


def test_without_the_owner_those_left_are_tied_to_each_other_and_its_file_isnt_read(tmp_path: Path) -> None:
    path = save(tmp_path / "c", tied(), step=1, sharding=TWO, rng=False)
    for file in path.glob("a.shard*"):
        file.write_bytes(b"broken")
    loaded = load(path, only=["b", "bare"])
    assert same_memory(loaded["b"][0], loaded["b"][2], loaded["bare"])
    assert same(loaded["bare"], tied()["bare"])
    assert same(load(path, only=["bare"])["bare"], tied()["bare"])


def test_the_file_of_an_alias_is_hashed_too(tmp_path: Path) -> None:
    path = save(tmp_path / "c", tied(), step=1, sharding=TWO, rng=False)
    data = bytearray((path / "bare.shard-000.pt").read_bytes())
    data[-1] ^= 1
    (path / "bare.shard-000.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="sha256"):
        load(path)


def test_ties_across_files_go_to_another_device_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[torch.Size] = []
    to = torch.Tensor.to

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sent.append(tensor.shape)
        return to(tensor, *args, **options)

    path = save(tmp_path / "c", tied(), step=1, sharding=TWO, rng=False)
    monkeypatch.setattr(torch.Tensor, "to", noted)
    loaded = load(path, map_location="meta")
    assert loaded["bare"].device.type == "meta"
    assert sorted(sent) == [(4, 3), (7,), (20, 15)]


def rewritten(path: Path, change: Any) -> None:
    """The table changed, and an index that commits it."""
    table = json.loads((path / "tensors.json").read_bytes())
    change({json.dumps(row["key"]): row for row in table["tensors"]})
    data = compact(table)
    (path / "tensors.json").write_bytes(data)
    folder = os.open(path, os.O_RDONLY)
    try:
        index = read_index(folder, where=str(path))
    finally:
        os.close(folder)
    digest = hashlib.sha256(data).hexdigest()
    (path / "index.json").write_bytes(
        index_to_bytes(replace(index, tensors_bytes=len(data), tensors_sha256=digest))
    )


@pytest.mark.parametrize("other", ["bytes", "shape", "dtype", "stride", "nan"])
def test_a_table_that_ties_what_differs_is_refused(other: str, tmp_path: Path) -> None:
    x = torch.arange(1.0, 13.0).view(3, 4)
    y = {
        "bytes": x + 1, "shape": x.clone().view(4, 3), "dtype": x.clone().view(torch.int32),
        "stride": x.t().contiguous().t(), "nan": torch.full((3, 4), float("nan")),
    }[other]  # fmt: skip
    if other == "nan":
        x = y.view(torch.int32).bitwise_xor(1).view(torch.float32)
    path = save(tmp_path / "c", {"a": {"x": x}, "b": {"y": y}}, step=1, sharding=TWO, rng=False)
    assert same(load(path), {"a": {"x": x}, "b": {"y": y}})
    rewritten(path, lambda rows: rows['["b", "y"]'].update(alias_of=["a", "x"]))
    with pytest.raises(CorruptCheckpoint, match="ties"):
        load(path)


def test_a_table_that_ties_what_is_equal_only_saves_memory(tmp_path: Path) -> None:
    state = {"a": {"x": torch.full((3,), float("nan"))}, "b": {"y": torch.full((3,), float("nan"))}}
    path = save(tmp_path / "c", state, step=1, sharding=TWO, rng=False)
    rewritten(path, lambda rows: rows['["b", "y"]'].update(alias_of=["a", "x"]))
    loaded = load(path)
    assert same(loaded, state)
    assert same_memory(loaded["a"]["x"], loaded["b"]["y"])


def test_a_table_that_lists_more_of_meta_than_it_holds_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", tied(), step=1, sharding=TWO, rng=False)
    rewritten(path, lambda rows: rows['["bare"]'].update(file="meta.pt", offset=0))
    with pytest.raises(CorruptCheckpoint, match="doesn't fit"):
        load(path)
