"""`load(mmap=True)`: tensors that lie in their files, and what of them is checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptd
from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.errors import CorruptCheckpoint, InvalidArgument
from round_trip import same

TWO = ckptd.Sharding(shards=2)


def state() -> dict[str, Any]:
    weight = torch.randn(300, 20)
    return {
        "model": {"w": weight, "half": torch.randn(50).to(torch.bfloat16), "empty": torch.empty(0, 3)},
        "data": [weight, torch.randn(20, 30).t(), numpy.arange(700.0), torch.nn.Parameter(torch.randn(90))],
        "n": 3,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ckptd.save(tmp_path / "c", state(), step=1, sharding=TWO, rng=False)


def test_what_is_mapped_is_what_was_saved_types_and_ties_too(tmp_path: Path) -> None:
    held = state()
    loaded = ckptd.load(ckptd.save(tmp_path / "c", held, step=1, sharding=TWO, rng=False), mmap=True)
    assert same(loaded, held)
    assert loaded["model"]["w"].data_ptr() == loaded["data"][0].data_ptr()


def test_only_what_is_looked_at_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = CheckpointReader.read_into

    def read_into(self: CheckpointReader, name: str, spans: Any) -> None:
        read.append(name)
        real(self, name, spans)

    monkeypatch.setattr(CheckpointReader, "read_into", read_into)
    ckptd.load(folder, mmap=True)
    assert read == ["tensors.json", "meta.pt"]


def test_what_is_written_into_mapped_tensors_stays_in_this_process(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    loaded = ckptd.load(folder, mmap=True)
    loaded["model"]["w"].fill_(7)
    loaded["data"][2][:] = 7
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert float(loaded["data"][0].sum()) == 7 * 6000  # tied
    assert float(ckptd.load(folder)["model"]["w"].abs().max()) < 7


def test_mapped_tensors_outlive_the_files_and_the_call(folder: Path) -> None:
    wanted = ckptd.load(folder)
    loaded = ckptd.load(folder, mmap=True)
    only = loaded["data"][1]
    shutil.rmtree(folder)
    assert same(loaded, wanted)
    del loaded
    assert same(only, wanted["data"][1])


def test_damage_in_a_mapped_shard_is_what_verify_finds_and_in_the_small_files_the_load(
    folder: Path,
) -> None:
    shard = folder / "model.shard-001.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    ckptd.load(folder, mmap=True)
    with pytest.raises(CorruptCheckpoint, match="sha256"):
        ckptd.load(folder)
    with pytest.raises(CorruptCheckpoint, match="sha256"):
        ckptd.verify(folder)
    shard.write_bytes(content[:-1])
    with pytest.raises(CorruptCheckpoint, match="size"):
        ckptd.load(folder, mmap=True)
    shard.write_bytes(content)
    for name in ("meta.pt", "tensors.json", "index.json"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
        with pytest.raises(CorruptCheckpoint):
            ckptd.load(folder, mmap=True)
        (folder / name).write_bytes(good)


def test_a_checkpoint_in_one_file_is_read_and_checked_all_the_same(tmp_path: Path) -> None:
    held = state()
    folder = ckptd.save(tmp_path / "c", held, step=1, rng=False)
    assert same(ckptd.load(folder, mmap=True), held)
    content = bytearray((folder / "ckpt.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "ckpt.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="sha256"):
        ckptd.load(folder, mmap=True)


def test_only_what_is_asked_for_is_mapped(folder: Path) -> None:
    (folder / "data.shard-000.pt").unlink()
    assert list(ckptd.load(folder, mmap=True, only=["model", "n"])) == ["model", "n"]
    with pytest.raises(InvalidArgument, match="nothing"):
        ckptd.load(folder, mmap=True, only=["nothing"])
