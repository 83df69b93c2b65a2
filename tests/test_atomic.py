from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.disk import durable


def test_what_is_saved_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    ckptd.atomic_save({"a": torch.arange(3)}, tmp_path / "x.pt")
    ckptd.atomic_save({"a": torch.arange(4)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["a"].tolist() == [0, 1, 2, 3]
    assert os.listdir(tmp_path) == ["x.pt"]


def test_an_object_that_cant_be_saved_leaves_the_old_file(tmp_path: Path) -> None:
    ckptd.atomic_save(1, tmp_path / "x.pt")
    with pytest.raises(Exception, match=r"lambda|Can.t"):
        ckptd.atomic_save(lambda: 1, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == 1
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_failed_sync_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptd.atomic_save(1, tmp_path / "x.pt")
    ckptd.atomic_write_json(tmp_path / "x.json", 1)

    def fail(fd: int) -> None:
        raise OSError(5, "I/O error")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError):
        ckptd.atomic_save(2, tmp_path / "x.pt")
    with pytest.raises(OSError):
        ckptd.atomic_write_json(tmp_path / "x.json", 2)
    monkeypatch.undo()
    assert torch.load(tmp_path / "x.pt", weights_only=True) == 1
    assert (tmp_path / "x.json").read_text() == "1\n"
    assert sorted(os.listdir(tmp_path)) == ["x.json", "x.pt"]


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        ckptd.atomic_save(1, tmp_path / "x.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "x.pt").stat().st_mode & 0o777 == 0o640
