"""Paths that are no checkpoint, as people pass them: what load, verify and the command line say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.errors import CkptdError, CorruptCheckpoint, InvalidArgument, NothingThere
from ckptd.tensors.saving import save
from ckptd_daemon.cli import main
from made_series import Made

Reader = Callable[[Path], Any]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "root")
    made.commit(100)
    made.catalogue.write_index()
    return made


def command(name: str) -> Reader:
    """The command of the library's name, with its exit code as the error it stands for."""

    def read(path: Path) -> None:
        code = main.main([name, str(path)])
        raise {2: InvalidArgument, 3: NothingThere, 4: CorruptCheckpoint}[code]("as the exit code says")

    return read


@pytest.fixture(params=["load", "verify", "ckptd show", "ckptd verify"])
def read(request: pytest.FixtureRequest) -> Reader:
    name = str(request.param)
    return command(name.split()[1]) if " " in name else getattr(ckptd, name)  # type: ignore[no-any-return]


def refused(read: Reader, path: Path, kind: type[CkptdError], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(kind) as caught:
        read(path)
    return str(caught.value) + capsys.readouterr().err


def test_a_runs_folder_is_said_to_be_one(
    made: Made, read: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(read, made.dir, InvalidArgument, capsys)
    assert "a run's folder, not a checkpoint" in said
    assert f"latest_valid({str(made.root.path)!r}, 'r')" in said


def test_a_root_is_said_to_be_one(made: Made, read: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(read, made.root.path, InvalidArgument, capsys)
    assert "a root, not a checkpoint" in said and f"latest_valid({str(made.root.path)!r}, 'r')" in said


@pytest.mark.parametrize("name", ["ckpt.pt", "index.json", "tensors.json"])
def test_a_file_of_a_checkpoint_is_said_to_be_one(
    made: Made, read: Reader, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made.dir / made.names[0]
    said = refused(read, folder / name, InvalidArgument, capsys)
    assert "a file of a checkpoint" in said and f"pass its folder: {folder}" in said


def test_a_folder_with_nothing_of_a_checkpoint_in_it_is_nothing_there(
    tmp_path: Path, read: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert "nothing of one is in this folder" in refused(read, tmp_path / "photos", NothingThere, capsys)


@pytest.mark.parametrize("left", ["index.json", "tensors.json", "ckpt.pt", ""])
def test_what_is_left_of_a_checkpoint_is_a_corrupt_one(made: Made, left: str) -> None:
    folder = made.dir / made.names[0]
    for file in folder.iterdir():
        if file.name != left:
            file.unlink()
    with pytest.raises(CorruptCheckpoint):
        ckptd.verify(folder)
    with pytest.raises(CorruptCheckpoint):
        ckptd.load(folder)


def test_one_left_shard_outside_of_any_run_is_a_corrupt_checkpoint(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "c", {"model": {"w": torch.zeros(9)}}, step=1, sharding=ckptd.Sharding(shards=1), rng=False
    )
    for file in folder.iterdir():
        if ".shard-" not in file.name:
            file.unlink()
    assert len(list(folder.iterdir())) == 1
    with pytest.raises(CorruptCheckpoint):
        ckptd.load(folder)


def test_a_checkpoint_reached_by_a_link_or_copied_elsewhere_is_one(made: Made, tmp_path: Path) -> None:
    folder = made.dir / made.names[0]
    (tmp_path / "link").symlink_to(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert ckptd.load(tmp_path / "link")["train"] == ckptd.load(tmp_path / "copy")["train"]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_a_device_this_torch_cant_use_is_an_invalid_argument(made: Made) -> None:
    with pytest.raises(InvalidArgument, match=r"map_location: this torch can't use the device: 'cuda'"):
        ckptd.load(made.dir / made.names[0], map_location="cuda")


def test_a_device_that_isnt_there_is_an_invalid_argument(made: Made) -> None:
    with pytest.raises(InvalidArgument, match="map_location"):
        ckptd.load(made.dir / made.names[0], map_location="cuda:99")
