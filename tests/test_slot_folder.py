from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ckptd.disk import birth_time, slot_folder
from ckptd.disk.birth_time import born_ns
from ckptd.disk.rootdir import Root
from ckptd.disk.slot_folder import RECORD, record_root, recorded_ids, remove_slot_folder
from ckptd.errors import BadRoot


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "shm"))
    return tmp_path / "shm"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """One that has been used, with a slot folder that says so."""
    made = Root.open(tmp_path / "root", create=True)
    (made.service_dir / "lock").touch()
    record_root(made.slot_dir(), made.path)
    return made


def id_file(path: Path) -> Path:
    return path / ".ckptd" / "root.json"


@pytest.mark.parametrize("lost", ["file", "damaged", "service folder"])
def test_a_root_whose_id_was_lost_is_led_back_to_it_by_its_slots(root: Root, lost: str) -> None:
    (root.path / "run").mkdir()
    if lost == "file":
        id_file(root.path).unlink()
    elif lost == "damaged":
        id_file(root.path).write_bytes(b"{}")
    else:
        shutil.rmtree(root.service_dir)
    assert Root.open(root.path, create=False) == root
    assert Root.for_reading(root.path) == root


def test_a_copied_root_never_gets_the_slots_of_the_first(root: Root, tmp_path: Path) -> None:
    shutil.copytree(root.path, tmp_path / "copy")
    assert Root.open(tmp_path / "copy", create=False).id != root.id
    id_file(tmp_path / "copy").unlink()
    assert Root.open(tmp_path / "copy", create=False).id != root.id


def test_a_root_that_was_moved_keeps_its_slots_even_when_its_id_is_lost(root: Root, tmp_path: Path) -> None:
    root.path.rename(tmp_path / "moved")
    id_file(tmp_path / "moved").unlink()
    moved = Root.open(tmp_path / "moved", create=False)
    assert moved.id == root.id
    record_root(moved.slot_dir(), moved.path)
    assert str(moved.path) in (moved.slot_dir() / RECORD).read_text()


def test_a_fresh_root_does_not_get_the_slots_of_a_deleted_one_that_had_its_inode(root: Root) -> None:
    shutil.rmtree(root.service_dir)  # as good as a new folder with a recycled inode
    assert Root.open(root.path, create=False).id != root.id


def test_a_root_that_has_the_inode_of_a_deleted_one_gets_none_of_its_slots(
    root: Root, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_file(root.path).write_text("{}")  # another root's that was put in its place: it says another inode
    assert recorded_ids(shm, root.path) == [root.id]
    monkeypatch.setattr(birth_time, "born_ns", lambda _path: 5)
    assert recorded_ids(shm, root.path) == []
    assert Root.open(root.path, create=False).id != root.id


def test_a_folder_made_anew_has_another_birth_time_where_those_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    born = born_ns(tmp_path / "a")
    if born is None:
        pytest.skip("this file system keeps no birth times")
    os.utime(tmp_path / "a", (1, 1))
    (tmp_path / "a").rename(tmp_path / "b")
    assert born_ns(tmp_path / "b") == born
    (tmp_path / "b").rmdir()
    time.sleep(0.02)  # a kernel's clock of files goes in steps of up to 10 ms
    (tmp_path / "a").mkdir()
    assert born_ns(tmp_path / "a") != born
    assert born_ns(Path("/proc")) is None
    with pytest.raises(FileNotFoundError):
        born_ns(tmp_path / "none")


@pytest.mark.parametrize("kind", ["open to others", "file", "link"])
def test_what_is_no_private_folder_leads_to_no_root(root: Root, shm: Path, kind: str) -> None:
    folder = root.slot_dir()
    assert recorded_ids(shm, root.path) == [root.id]
    if kind == "open to others":
        folder.chmod(0o750)
    else:
        moved = folder.rename(shm / "elsewhere")
        folder.symlink_to(moved) if kind == "link" else folder.touch(0o600)
    assert recorded_ids(shm, root.path) == []


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b'{"schema": "x", "path": "", "dev": 1, "ino": 2}'])
def test_a_folder_that_says_nothing_readable_is_nobodys(root: Root, shm: Path, data: bytes) -> None:
    assert recorded_ids(shm, root.path) == [root.id]
    (root.slot_dir() / RECORD).write_bytes(data)
    assert recorded_ids(shm, root.path) == []
    record_root(root.slot_dir(), root.path)
    assert recorded_ids(shm, root.path) == [root.id]


def test_only_private_folders_of_ours_are_believed(root: Root, shm: Path, tmp_path: Path) -> None:
    folder = root.slot_dir()
    link = shm / slot_folder.slot_folder_name("0" * 32)
    link.symlink_to(folder)
    (shm / f"ckptd-{os.geteuid() + 1}-{'1' * 32}").mkdir(mode=0o700)
    assert recorded_ids(shm, root.path) == [root.id]
    folder.chmod(0o755)
    assert recorded_ids(shm, root.path) == []
    folder.chmod(0o700)
    assert recorded_ids(tmp_path / "none", root.path) == []


def test_no_new_id_is_made_while_nobody_can_say_whether_there_are_slots(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(*_: object) -> int:
        raise OSError(24, "too many open files")

    id_file(root.path).unlink()
    with monkeypatch.context() as without:
        without.setattr(slot_folder, "open_folder", no_descriptor)
        with pytest.raises(BadRoot, match="too many open files"):
            Root.open(root.path, create=False)
    assert Root.open(root.path, create=False) == root


def test_the_folder_goes_when_no_slot_is_left(root: Root) -> None:
    folder = root.slot_dir()
    (folder / "slot").touch()
    with pytest.raises(OSError, match="not empty"):
        remove_slot_folder(folder)
    assert (folder / RECORD).exists()
    (folder / "slot").unlink()
    remove_slot_folder(folder)
    assert not folder.exists()
