from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptd.disk import birth_time, durable, root_id
from ckptd.disk.rootdir import DaemonRecord, Root, own_start, private_dir, process_started
from ckptd.errors import BadRoot, InvalidArgument


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "shm"))


def record(**changes: object) -> DaemonRecord:
    pid, started = own_start()
    fields: dict[str, object] = {
        "endpoint": "ipc:///x.sock", "pid": pid, "pid_started": started, "daemon_id": "d1",
        "started_at": 1.5, "version": "0.1.0", "log": "/l",
    }  # fmt: skip
    return DaemonRecord(**(fields | changes))  # type: ignore[arg-type]


def test_a_root_keeps_its_id(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a" / "b", create=True)
    assert len(root.id) == 32
    assert Root.open(tmp_path / "a" / "b", create=False) == root
    assert Root.for_reading(tmp_path / "a" / "b") == root


def test_a_moved_root_keeps_its_id_and_a_copied_one_gets_another(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a", create=True)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Root.open(tmp_path / "b", create=False)
    assert moved.id == root.id
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    assert Root.for_reading(tmp_path / "c").id == ""
    assert Root.open(tmp_path / "c", create=False).id not in ("", root.id)
    assert Root.open(tmp_path / "b", create=False).id == root.id


def test_a_record_that_was_copied_with_its_root_names_nobody(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a", create=True)
    record().write(root)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    assert DaemonRecord.read(Root.for_reading(tmp_path / "c")) is None
    (tmp_path / "a").rename(tmp_path / "b")
    assert DaemonRecord.read(Root.for_reading(tmp_path / "b")) == record()


def test_a_backup_in_the_place_of_a_deleted_root_with_its_inode_has_neither_its_id_nor_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.open(tmp_path / "a", create=True)
    record().write(root)
    monkeypatch.setattr(birth_time, "born_ns", lambda _: 5)  # all else is as it was recorded
    assert DaemonRecord.read(root) is None
    assert Root.for_reading(root.path).id == ""
    assert Root.open(root.path, create=False).id not in ("", root.id)


def test_a_damaged_id_file_is_replaced(tmp_path: Path) -> None:
    Root.open(tmp_path / "a", create=True)
    for data in (b"", b"{}", b"null", b'{"schema": "ckptd.root-v1", "id": "../../x", "dev": 1, "ino": 2}'):
        (tmp_path / "a" / ".ckptd" / "root.json").write_bytes(data)
        assert len(Root.open(tmp_path / "a", create=False).id) == 32


def test_many_that_open_a_fresh_root_at_once_agree_on_its_id(tmp_path: Path) -> None:
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda: ids.append(Root.open(tmp_path / "a", create=True).id))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1


def test_an_id_that_another_process_is_making_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, service = tmp_path / "a", tmp_path / "a" / ".ckptd"
    service.mkdir(parents=True, mode=0o700)
    ids: list[str] = []
    asked = threading.Event()  # for the lock; or it was never asked for

    def flock(fd: int, how: int) -> None:
        asked.set()
        fcntl.flock(fd, how)

    def make() -> None:
        ids.append(root_id.read_or_make_id(root, service, tmp_path / "shm"))
        asked.set()

    fd = os.open(service, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(root_id, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX))
    thread = threading.Thread(target=make)
    thread.start()
    assert asked.wait(60)
    root_id._write(root, service, "5" * 32)
    os.close(fd)
    thread.join(60)
    assert ids == ["5" * 32]


def test_a_root_that_somebody_else_made_is_made_durable_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / ".ckptd").mkdir(parents=True, mode=0o700)  # by a script, or by a writer that died before its sync
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_dir", synced.append)
    Root.open(root, create=True)
    assert {root, root.parent} <= set(synced)


def test_opening_for_reading_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert Root.for_reading(tmp_path / "a").id == ""
    assert list((tmp_path / "a").iterdir()) == []


def test_a_root_that_is_a_file_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, create in (
        (tmp_path / "file", True), (tmp_path / "file", False), (tmp_path / "file" / "below", True),
        (tmp_path / "none", False),
    ):  # fmt: skip
        with pytest.raises(BadRoot):
            Root.open(path, create=create)
    with pytest.raises(BadRoot):
        Root.for_reading(tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "seen"), [(b"\xff\xfe", "UTF-8"), (b"a\0b", "NUL"), (b"/".join([b"d" * 200] * 20), "bytes")]
)
def test_a_path_that_no_record_can_hold_is_refused_before_anything_is_made(
    tmp_path: Path, name: bytes, seen: str
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    for use in (lambda: Root.open(path, create=True), lambda: Root.for_reading(path)):
        with pytest.raises(BadRoot, match=seen) as caught:
            use()
        assert "/" in str(caught.value).encode().decode()  # can be printed
    assert not list(tmp_path.iterdir())


def test_a_link_to_such_a_path_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(BadRoot, match="UTF-8"):
        Root.open(tmp_path / "link", create=True)


def test_a_service_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a" / ".ckptd").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRoot):
        Root.open(tmp_path / "a", create=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_that_can_not_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o500)
    with pytest.raises(BadRoot):
        Root.open(tmp_path / "a", create=False)


def test_a_run_that_is_no_name_is_refused(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a", create=True)
    assert root.run_dir("gpt") == root.path / "gpt"
    for run in ("..", "", "A", ".ckptd", "a/b", "quarantine"):
        with pytest.raises(InvalidArgument):
            root.run_dir(run)


def test_private_folders_are_made_with_0700_and_checked(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a", create=True)
    for folder in (root.slot_dir(), root.runtime_dir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o755)
        with pytest.raises(BadRoot):
            private_dir(folder)


def test_a_private_folder_is_no_link_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(BadRoot):
            private_dir(tmp_path / name)


def test_asking_for_the_slot_path_makes_nothing(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a", create=True)
    assert root.id in root.slot_path.name
    assert not root.slot_path.exists()


def test_a_socket_path_that_is_too_long_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root.open(tmp_path / "a", create=True)
    assert root.new_socket_path() != root.new_socket_path()
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(BadRoot, match="at most 107"):
        root.new_socket_path()


def test_roots_with_long_paths_and_the_same_start_get_different_short_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 150)
    roots = [Root.open(deep / name, create=True) for name in ("one", "onetwo")]
    assert roots[0].socket_prefix != roots[1].socket_prefix
    assert roots[0].slot_path != roots[1].slot_path
    assert str(deep) not in str(roots[0].new_socket_path())


def test_a_daemon_record_comes_back_and_is_withdrawn_only_by_its_own_daemon(tmp_path: Path) -> None:
    root = Root.open(tmp_path / "a", create=True)
    assert DaemonRecord.read(root) is None
    record().write(root)
    assert DaemonRecord.read(root) == record()
    record(daemon_id="another").remove(root)
    assert DaemonRecord.read(root) == record()
    record().remove(root)
    assert DaemonRecord.read(root) is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"schema": "ckptd.daemon-v1"}', b"{}" * 40_000])
def test_a_damaged_daemon_record_is_none(tmp_path: Path, data: bytes) -> None:
    root = Root.open(tmp_path / "a", create=True)
    (root.service_dir / "daemon.json").write_bytes(data)
    assert DaemonRecord.read(root) is None


def test_a_process_is_known_by_pid_and_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(child.pid)
    assert started is not None
    alive = record(pid=child.pid, pid_started=started)
    assert alive.alive()
    assert not record(pid=child.pid, pid_started=started + 1).alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped: a zombie counts as dead
    assert not alive.alive()
    child.communicate()
    assert process_started(child.pid) is None
    assert process_started(-1) is None


def test_a_file_where_slots_are_to_lie_is_said_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "file"))
    with pytest.raises(BadRoot, match="CKPTD_SHM_DIR is no folder"):
        Root.open(tmp_path / "root", create=True).slot_dir()
