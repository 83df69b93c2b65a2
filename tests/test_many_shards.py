from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.errors import CheckpointGone, CorruptCheckpoint, ReadFailed
from unreadable_disk import descriptors_left

SHARDS = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of more files than are opened at once."""
    weights = {f"w{n}": torch.full((4,), float(n)) for n in range(SHARDS)}
    path = tmp_path / "step-000000001"
    ckptd.save(path, {"model": weights}, step=1, sharding=ckptd.Sharding(shards=SHARDS))
    return path


def test_a_checkpoint_of_more_files_than_descriptors_is_loaded(folder: Path) -> None:
    with descriptors_left(8):
        loaded = ckptd.load(folder)
    assert [float(loaded["model"][f"w{n}"][0]) for n in range(SHARDS)] == [float(n) for n in range(SHARDS)]


def test_without_any_descriptor_loading_says_so(folder: Path) -> None:
    told: Exception | None = None
    with descriptors_left(0):
        try:
            ckptd.load(folder)
        except ReadFailed as error:
            told = error
    assert "ulimit -n" in str(told)


def test_a_file_of_another_size_is_found_before_the_first_is_read(folder: Path) -> None:
    with (folder / "model.shard-077.pt").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CorruptCheckpoint, match="size"):
        CheckpointReader(os.fspath(folder))


def test_one_removed_while_it_is_read_is_gone_and_one_without_a_file_corrupt(folder: Path) -> None:
    with CheckpointReader(os.fspath(folder)) as reader:
        (folder / "model.shard-077.pt").rename(folder.parent / "aside")
        with pytest.raises(CorruptCheckpoint, match="missing"):
            reader.read("model.shard-077.pt")
        folder.rename(folder.parent / "away")
        with pytest.raises(CheckpointGone):
            reader.read("model.shard-077.pt")
