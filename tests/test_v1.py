"""Format v1, written here exactly as its files were: by torch.save, both kinds."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.disk.verification import verify
from ckptd.errors import CorruptCheckpoint, NothingThere, UnknownSchema
from ckptd.tensors.v1 import load_v1, read_v1


def rng(*, key_row_as_array: bool = False) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, key, *rest = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, key if key_row_as_array else key.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [],
    }


def trained(*, key_row_as_array: bool = False) -> dict[str, Any]:
    """A payload of v1 after one real step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "schema": "ckpt.v1",
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "state": {"step": 20, "epoch": 1, "batch_in_epoch": 3, "losses": [0.5] * 20},
        "rng": rng(key_row_as_array=key_row_as_array),
        "wall_saved_at": 1_700_000_000.25,
    }


def write_single(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    torch.save(trained() | changes, folder / "ckpt.pt")
    return folder


def write_sharded(
    folder: Path, shards: int = 3, *, index: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """As v1 wrote it: the model in shards, the rest in meta.pt, the hashes in index.json."""
    folder.mkdir(parents=True)
    payload = trained() | {"schema": "ckpt.v1-sharded"} | changes
    model = payload.pop("model")
    rows = []
    for number in range(shards):
        keys = sorted(model)[number::shards]
        name = f"model.shard-{number:03d}.pt"
        tensors = {key: model[key] for key in keys}
        torch.save({"schema": "ckpt-shard.v1", "tensors": tensors, "keys": keys}, folder / name)
        count = sum(tensor.numel() for tensor in tensors.values())
        rows.append({"shard": number, "path": name, "num_params": count, "sha256": sha256(folder / name)})
    torch.save(
        payload | {"shards": [row["path"] for row in rows], "extras": {"note": "x"}}, folder / "meta.pt"
    )
    record = {"schema": "ckpt.v1-index", "num_shards": shards, "shards": rows, "step": 20}
    record |= {"meta_sha256": sha256(folder / "meta.pt"), "saved_at": payload["wall_saved_at"]}
    (folder / "index.json").write_text(json.dumps(record | (index or {})))
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def equal(a: Any, b: Any) -> bool:
    """Equal in value and type, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


COMPONENTS = ("model", "optimizer", "scheduler", "state", "rng")
Write = Callable[..., Path]


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_both_kinds_give_the_components_they_were_saved_with(tmp_path: Path, write: Write) -> None:
    found = load_v1(write(tmp_path / "old"))
    wanted = trained()
    for name in COMPONENTS:
        assert equal(dict(found[name]), dict(wanted[name])), name
    assert ("extras" in found) == (write is write_sharded)


def test_the_one_file_kind_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "old")
    assert equal(load_v1(folder)["state"], load_v1(folder / "ckpt.pt")["state"])


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_a_numpy_key_row_that_is_an_array_is_read_and_comes_as_a_list(tmp_path: Path, write: Write) -> None:
    wanted = rng()
    found = load_v1(write(tmp_path / "old", rng=rng(key_row_as_array=True)))
    assert equal(found["rng"], wanted)


def test_the_key_row_as_older_numpy_spelled_it_is_read_too(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "old", rng=rng(key_row_as_array=True))
    renamed = rewrite_pickle(folder / "ckpt.pt", b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert equal(load_v1(renamed)["rng"], rng())


def rewrite_pickle(path: Path, old: bytes, new: bytes) -> Path:
    """The archive with the global's module renamed in its pickle."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        records = [(info, archive.read(info)) for info in archive.infolist()]
    assert any(old in data for _, data in records)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for info, data in records:
            archive.writestr(info.filename, data.replace(old, new))
    return path


class Runs:
    """What it unpickles to would run a function."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_a_file_that_names_any_other_global_is_refused_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_single(tmp_path / "old", extras=Runs())
    with pytest.raises(
        CorruptCheckpoint, match=r"ckpt\.pt: holds what only code could rebuild.*print"
    ) as refused:
        load_v1(folder)
    assert "weights_only" not in str(refused.value)
    assert capsys.readouterr().out == ""


def test_the_allow_list_is_gone_after_loading(tmp_path: Path) -> None:
    load_v1(write_single(tmp_path / "old"))
    assert np.ndarray not in torch.serialization.get_safe_globals()


def test_what_no_hash_vouches_for_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_v1(write_single(tmp_path / "one")).unhashed == ("ckpt.pt",)
    assert "v1.unhashed" in caplog.text
    assert read_v1(write_sharded(tmp_path / "many")).unhashed == ()
    assert read_v1(write_sharded(tmp_path / "early", index={"meta_sha256": None})).unhashed == ("meta.pt",)


@pytest.mark.parametrize("name", ["meta.pt", "model.shard-001.pt"])
def test_a_flipped_bit_in_a_hashed_file_is_found_with_both_hashes(tmp_path: Path, name: str) -> None:
    folder = write_sharded(tmp_path / "old")
    before = sha256(folder / name)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=name) as caught:
        load_v1(folder)
    assert (caught.value.seen, caught.value.wanted) == (sha256(folder / name), before)


@pytest.mark.parametrize("name", ["meta.pt", "model.shard-001.pt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_sharded(tmp_path / "old")
    (folder / name).unlink()
    with pytest.raises(CorruptCheckpoint, match=f"{name}: a file is missing"):
        load_v1(folder)


@pytest.mark.parametrize("keep", [0, 1, 100, 2000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    folder = write_single(tmp_path / "old")
    data = (folder / "ckpt.pt").read_bytes()
    (folder / "ckpt.pt").write_bytes(data[:keep])
    with pytest.raises(CorruptCheckpoint):
        load_v1(folder)


@pytest.mark.parametrize(
    "index",
    [
        {"num_shards": 2},
        {"shards": []},
        {"shards": [{"path": "../model.shard-000.pt"}], "num_shards": 1},
        {"shards": [{"path": "/etc/passwd"}], "num_shards": 1},
        {"shards": [{"path": "model.shard-000.pt"}] * 2, "num_shards": 2},
        {"shards": [{"path": "model.shard-000.pt", "sha256": "00"}], "num_shards": 1},
        {"shards": ["model.shard-000.pt"], "num_shards": 1},
        {"step": 19},
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        load_v1(write_sharded(tmp_path / "old", index=index))


def test_a_shard_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "old")
    (folder / "model.shard-000.pt").rename(tmp_path / "elsewhere.pt")
    (folder / "model.shard-000.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(CorruptCheckpoint, match="link"):
        load_v1(folder)


@pytest.mark.parametrize(
    "changes", [{"state": {}}, {"state": {"step": True}}, {"wall_saved_at": "x"}, {"model": 3}]
)
def test_a_payload_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint):
        load_v1(write_single(tmp_path / "old", **changes))


def test_an_unknown_schema_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnknownSchema, match=r"ckpt\.v9") as caught:
        load_v1(write_single(tmp_path / "one", schema="ckpt.v9"))
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnknownSchema, match=r"ckpt\.v9-index"):
        load_v1(write_sharded(tmp_path / "many", index={"schema": "ckpt.v9-index"}))


@pytest.mark.timeout(100)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ckpt.pt")
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        with pytest.raises(CorruptCheckpoint, match="not a regular file"):
            read_v1(path)


def test_nothing_there_is_said_as_that(tmp_path: Path) -> None:
    with pytest.raises(NothingThere):
        load_v1(tmp_path)
    with pytest.raises(NothingThere):
        load_v1(tmp_path / "no-such-file.pt")


def test_verify_says_of_a_single_file_that_it_is_unhashed_and_what_to_do(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "old")
    for path in (folder, folder / "ckpt.pt"):
        with pytest.raises(CorruptCheckpoint, match="unhashed: try ckptd migrate"):
            verify(path)
