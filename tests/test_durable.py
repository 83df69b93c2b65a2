from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.disk import durable, new_file
from ckptd.errors import InvalidArgument
from ckptd.names import parse_work_folder


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_many_small_and_one_large_segment_are_written_and_hashed_as_they_are(tmp_path: Path) -> None:
    large = os.urandom(9 * 2**20 + 13)
    segments = [b"head", b"", *[b"x" * n for n in range(200)], memoryview(large), b"tail"]
    written = durable.write_new(tmp_path / "file", segments)
    whole = b"".join(segments)
    assert (tmp_path / "file").read_bytes() == whole
    assert written == new_file.Written(len(whole), hashlib.sha256(whole).hexdigest())


def test_an_iterator_of_segments_is_written_whole(tmp_path: Path) -> None:
    pieces = [bytes([n]) * 2**20 for n in range(10)]
    written = durable.write_new(tmp_path / "file", iter(pieces))
    assert written.sha256 == hashlib.sha256(b"".join(pieces)).hexdigest()


def test_an_empty_file_can_be_written(tmp_path: Path) -> None:
    assert durable.write_new(tmp_path / "file", []).bytes == 0


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_name_that_is_taken_is_not_written_to(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        durable.write_new(path, [b"yours"])
    assert os.path.lexists(path)
    assert not (tmp_path / "nowhere").exists()


def test_a_write_that_stops_half_way_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"x" * 2**20
        raise RuntimeError("source gone")

    with pytest.raises(RuntimeError):
        durable.write_new(tmp_path / "file", broken())
    with pytest.raises(RuntimeError):
        durable.replace_file(tmp_path / "file", broken())
    assert list(tmp_path.iterdir()) == []


def test_a_failed_fsync_is_told_apart_and_removes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(durable.FsyncFailed):
        durable.write_new(tmp_path / "file", [b"x"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_modes_come_from_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    with umask(mask):
        durable.write_new(tmp_path / "new", [b"x"])
        durable.atomic_write_json(tmp_path / "replaced.json", {})
    for name in ("new", "replaced.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_tmpdir_on_another_file_system_plays_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere/at/all")
    durable.atomic_write_json(tmp_path / "a.json", [1])
    assert (tmp_path / "a.json").read_bytes() == b"[\n  1\n]\n"


def test_replacing_a_link_replaces_the_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    durable.replace_file(tmp_path / "link", [b"new"])
    assert (tmp_path / "target").read_text() == "old"
    assert not (tmp_path / "link").is_symlink()


def test_what_is_no_strict_json_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    durable.atomic_write_json(path, {"a": 1})
    for bad in (float("nan"), {1: 2, "a": 3}, object(), {"x": b""}):
        with pytest.raises(InvalidArgument):
            durable.atomic_write_json(path, bad)
    assert path.read_bytes() == b'{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_is_replaced_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    durable.replace_file(tmp_path / "cache", [b"x"], sync=False)
    assert (tmp_path / "cache").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_taken_name_is_never_renamed_over(tmp_path: Path, kind: str) -> None:
    (tmp_path / "src").mkdir()
    dst = tmp_path / "dst"
    if kind == "file":
        dst.write_text("x")
    elif kind == "folder":
        dst.mkdir()  # os.rename would replace an empty folder without a word
    else:
        dst.symlink_to(tmp_path / "nowhere")
    before = dst.lstat()
    with pytest.raises(FileExistsError):
        durable.rename_new(tmp_path / "src", dst)
    assert dst.lstat().st_ino == before.st_ino
    assert (tmp_path / "src").is_dir()


def test_a_rename_is_synced_where_the_name_came_to_and_where_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(durable, "fsync_dir", lambda path: synced.append(path.name))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "one" / "a").touch()
    durable.rename_new(tmp_path / "one" / "a", tmp_path / "one" / "b")
    assert synced == ["one"]
    durable.rename_new(tmp_path / "one" / "b", tmp_path / "two" / "b")
    assert synced == ["one", "two", "one"]


def test_missing_parents_are_made_and_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    durable.make_dirs(tmp_path / "a" / "b" / "c")
    durable.make_dirs(tmp_path / "a" / "b" / "c")
    (tmp_path / "a" / "file").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        durable.make_dirs(tmp_path / "a" / "file" / "d")


def test_a_folder_whose_name_could_not_be_made_durable_is_not_taken_for_durable_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(durable.FsyncFailed):
            durable.make_dirs(tmp_path / "run")
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_dir", synced.append)
    durable.make_dirs(tmp_path / "run")
    assert synced[0] == tmp_path


def test_folders_above_are_synced_up_to_one_that_is_closed_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made them may have been killed before their sync, and nothing shows it."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    synced: list[Path] = []

    def sync(path: Path) -> None:
        if path == tmp_path.parent:
            raise PermissionError(13, "Permission denied")
        synced.append(path)

    monkeypatch.setattr(durable, "fsync_dir", sync)
    durable.make_dirs(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path]


def test_removing_a_tree_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "link").symlink_to(outside)
    (tmp_path / "link").symlink_to(outside)
    for path in (tree, tmp_path / "link", tmp_path / "never-there"):
        durable.remove_tree(path)
        assert not os.path.lexists(path)
    assert (outside / "precious").read_text() == "x"


def test_temporary_names_are_those_that_the_next_start_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = os.replace

    def spy(src: Path, dst: Path) -> None:
        seen.append(Path(src).name)
        real(src, dst)

    monkeypatch.setattr(os, "replace", spy)
    durable.replace_file(tmp_path / "index.json", [b"x"])
    assert [parse_work_folder(name) for name in seen] == [("tmp", 0)]
