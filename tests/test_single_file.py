"""A checkpoint in one file: its large tensors are copied once, and are what torch reads from the same file."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import CorruptCheckpoint
from ckptd.format.archive_check import check_archive
from ckptd.tensors.single_file import LargeTensors, SparseFile
from round_trip import same

LARGE = 40_000  # elements; of two bytes and more they aren't given to torch


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    tied = torch.randn(LARGE)
    return {
        "a": OrderedDict(
            tied=tied, small=torch.randn(3), turned=torch.randn(200, 300).t(), empty=torch.empty(0)
        ),
        "b": [tied, torch.arange(LARGE, dtype=torch.float64), (torch.randn(LARGE) > 0).repeat(4)],
        "c": {
            "parameter": nn.Parameter(torch.randn(4, 8, 30, 40).to(memory_format=torch.channels_last)),
            "leaf": torch.randn(LARGE, dtype=torch.bfloat16).requires_grad_(),
            "array": numpy.arange(LARGE),
        },
    }


def test_all_is_what_torch_reads_and_as_it_was_saved(tmp_path: Path) -> None:
    before = state()
    ckptd.save(tmp_path / "c", before, step=1)
    loaded = ckptd.load(tmp_path / "c")
    assert all(same(before[name], loaded[name]) for name in before)
    theirs = torch.load(tmp_path / "c/ckpt.pt", weights_only=True)
    assert same(theirs["a"], loaded["a"])
    assert same(theirs["b"], loaded["b"])


def test_what_is_tied_is_tied_and_nothing_keeps_more_memory_than_its_own(tmp_path: Path) -> None:
    ckptd.save(tmp_path / "c", state(), step=1)
    loaded = ckptd.load(tmp_path / "c")
    assert loaded["a"]["tied"].data_ptr() == loaded["b"][0].data_ptr()
    for one in (*loaded["a"].values(), *loaded["b"], loaded["c"]["parameter"], loaded["c"]["leaf"]):
        assert one.untyped_storage().nbytes() == one.nbytes


def test_a_component_alone_has_its_values_whoever_else_has_them(tmp_path: Path) -> None:
    before = state()
    ckptd.save(tmp_path / "c", before, step=1)
    for name in before:
        assert same(before[name], ckptd.load(tmp_path / "c", only=[name])[name])


def test_a_restore_copies_each_large_tensor_once_into_the_live_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 256)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    before, live = make(1), make(2)
    ckptd.save(tmp_path / "c", before, step=1)
    moments = live["optimizer"].state.values()
    wanted = [one.data_ptr() for one in live["model"].parameters() if one.dim() == 2]
    wanted += [
        each[name].data_ptr()
        for each in moments
        for name in ("exp_avg", "exp_avg_sq")
        if each[name].dim() == 2
    ]
    written = []

    def watched(self: LargeTensors, offset: int, into: torch.Tensor, real: Any = LargeTensors._copy) -> None:
        written.append(into.data_ptr())
        real(self, offset, into)

    monkeypatch.setattr(LargeTensors, "_copy", watched)
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        assert client.restore(live, source=tmp_path / "c") is not None
    assert sorted(written) == sorted(wanted)
    assert all(same(before[name].state_dict(), live[name].state_dict()) for name in before)


def test_damage_anywhere_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    ckptd.save(tmp_path / "c", {"w": torch.ones(LARGE)}, step=1)
    file = tmp_path / "c/ckpt.pt"
    content = bytearray(file.read_bytes())
    content[content.rindex(torch.ones(1).numpy().tobytes())] ^= 1  # in the last element
    file.write_bytes(content)
    live = {"w": torch.zeros(LARGE)}
    with ckptd.Client(tmp_path / "root", daemon="off") as client, pytest.raises(CorruptCheckpoint):
        client.restore(live, source=tmp_path / "c")
    assert not live["w"].any()


def test_a_file_of_the_other_byte_order_is_read_as_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
        ckptd.save(tmp_path / "c", {"w": torch.arange(LARGE)}, step=1, rng=False)
    theirs = torch.load(tmp_path / "c/ckpt.pt", weights_only=True)
    assert not torch.equal(theirs["w"], torch.arange(LARGE))
    assert torch.equal(ckptd.load(tmp_path / "c")["w"], theirs["w"])


def test_nothing_is_left_out_where_it_isnt_sure_whose_the_bytes_are(tmp_path: Path) -> None:
    ckptd.save(tmp_path / "c", {"w": torch.arange(LARGE), "v": torch.arange(LARGE)}, step=1, rng=False)
    content = memoryview((tmp_path / "c/ckpt.pt").read_bytes())
    file = SparseFile(content, check_archive(content, "c", ours=True))
    read = torch.load(file, weights_only=True)  # type: ignore[arg-type]
    read = {name: read[name] for name in ("w", "v")}
    found = file.large_tensors(read)
    assert found is not None
    assert [part.name for part in found] == ["w", "v"]
    assert file.large_tensors({"w": read["w"]}) is None  # whose are the others?
    assert file.large_tensors(read | {"x": torch.zeros(LARGE)}) is None  # not of this file
    assert file.large_tensors({"w": read["w"][:-1], "v": read["v"]}) is None  # not the whole of its bytes
