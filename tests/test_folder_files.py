from __future__ import annotations

import os
from pathlib import Path
from pipes import waits_for_the_pipe

import pytest

from ckptd.disk import folder_files
from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.errors import CorruptCheckpoint


def read(path: Path, max_bytes: int) -> bytes:
    folder = open_folder(path.parent)
    try:
        return read_small_file(folder, path.name, str(path), max_bytes)
    finally:
        os.close(folder)


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_small_file_is_read_whole(tmp_path: Path, size: int) -> None:
    (tmp_path / "f").write_bytes(b"a" * size)
    assert read(tmp_path / "f", 100) == b"a" * size


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a" * 101)
    with pytest.raises(CorruptCheckpoint, match="at most 100 bytes"):
        read(tmp_path / "f", 100)


def test_no_more_memory_is_asked_for_than_the_file_has(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a" * 10)
    assert read(tmp_path / "f", 2**62) == b"a" * 10  # that much can't be had


def test_a_file_that_grows_meanwhile_is_read_whole_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * 10)
    monkeypatch.setattr(folder_files, "_size", lambda _: 3)
    assert read(path, 100) == b"a" * 10
    with pytest.raises(CorruptCheckpoint):
        read(path, 9)


def test_a_link_to_a_folder_or_to_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a")
    (tmp_path / "file").symlink_to(tmp_path / "f")
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(CorruptCheckpoint, match="a link"):
        read(tmp_path / "file", 100)
    with pytest.raises(NotADirectoryError):
        open_folder(tmp_path / "folder")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    assert not waits_for_the_pipe(tmp_path / "f", lambda: read(tmp_path / "f", 100))
    with pytest.raises(CorruptCheckpoint, match="not a regular file"):
        read(tmp_path / "f", 100)
