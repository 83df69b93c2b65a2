from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd import migrate_v1_to_v2
from ckptd.errors import InvalidArgument, UnknownSchema
from ckptd.format.records import read_index
from test_v1 import COMPONENTS, equal, rng, trained, write_sharded, write_single

Write = Callable[..., Path]
KINDS = [write_single, write_sharded]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("write", KINDS)
def test_the_new_checkpoint_lies_beside_the_old_one_which_stays_as_it_was(
    tmp_path: Path, write: Write
) -> None:
    old = write(tmp_path / "old")
    before = digests(old)
    new = migrate_v1_to_v2(old)
    assert new == tmp_path / "step-000000020"
    assert digests(old) == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["old", "step-000000020"]


@pytest.mark.parametrize("write", KINDS)
def test_it_gives_the_same_components_through_ckptd_load(tmp_path: Path, write: Write) -> None:
    found = ckptd.load(migrate_v1_to_v2(write(tmp_path / "old", rng=rng(key_row_as_array=True))))
    wanted = trained()
    for name in COMPONENTS:
        assert equal(found[name], wanted[name]) or equal(dict(found[name]), dict(wanted[name])), name
    assert ("extras" in found) == (write is write_sharded)


@pytest.mark.parametrize("write", KINDS)
def test_ckptd_load_reads_the_old_one_too(tmp_path: Path, write: Write) -> None:
    found = ckptd.load(write(tmp_path / "old"))
    assert equal(dict(found["model"]), dict(trained()["model"]))


@pytest.mark.parametrize("write", KINDS)
def test_it_has_all_the_fields_of_v2_and_passes_verification(tmp_path: Path, write: Write) -> None:
    new = migrate_v1_to_v2(write(tmp_path / "old"))
    index = read_index(new)
    assert (index.step, index.saved_at, index.world_size) == (20, 1_700_000_000.25, 1)
    assert index.layout == ("sharded" if write is write_sharded else "single")
    assert set(index.versions) == {"ckptd", "torch", "numpy", "python"}
    assert ckptd.verify(new).ok


def test_a_sharded_one_keeps_its_number_of_model_shards(tmp_path: Path) -> None:
    new = migrate_v1_to_v2(write_sharded(tmp_path / "old", shards=2))
    assert sorted(file.name for file in new.glob("model.*")) == ["model.shard-000.pt", "model.shard-001.pt"]
    merged: dict[str, Any] = {}
    for file in new.glob("model.*"):
        merged.update(torch.load(file, weights_only=True)["tensors"])
    assert equal(dict(sorted(merged.items())), dict(sorted(trained()["model"].items())))


def test_the_one_file_given_by_name_is_migrated_beside_itself(tmp_path: Path) -> None:
    assert migrate_v1_to_v2(write_single(tmp_path / "old") / "ckpt.pt") == tmp_path / "old" / "step-000000020"


def test_a_taken_name_is_never_written_over(tmp_path: Path) -> None:
    old = write_single(tmp_path / "old")
    first = migrate_v1_to_v2(old)
    before = digests(first)
    assert migrate_v1_to_v2(old).name == "step-000000020.2"
    with pytest.raises(InvalidArgument):
        migrate_v1_to_v2(old, out=first)
    assert digests(first) == before


def test_out_names_the_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert migrate_v1_to_v2(write_single(tmp_path / "old"), out) == out
    assert (out / "index.json").is_file()


def test_a_v2_checkpoint_is_not_migrated_again(tmp_path: Path) -> None:
    new = migrate_v1_to_v2(write_single(tmp_path / "old"))
    with pytest.raises(UnknownSchema):
        migrate_v1_to_v2(new)


@pytest.mark.parametrize("write", KINDS)
def test_a_migrated_checkpoint_restores_model_optimizer_and_counters(tmp_path: Path, write: Write) -> None:
    from ckptd.tensors.restoring import apply_state

    new = migrate_v1_to_v2(write(tmp_path / "old"))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    counters = ckptd.TrainState()
    state = {"model": model, "optimizer": optimizer, "state": counters}
    apply_state(state, ckptd.load(new, only=list(state)), only=list(state))
    wanted = trained()
    assert equal(dict(model.state_dict()), dict(wanted["model"]))
    assert equal(optimizer.state_dict(), wanted["optimizer"])
    assert (counters.step, counters.losses) == (20, [0.5] * 20)
