from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.disk.lock import RootLock
from ckptd.disk.lock import holder as named_holder
from ckptd.disk.rootdir import DaemonRecord, Root, own_start
from ckptd.errors import RootLocked

HOLD = """
import sys
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root
lock = RootLock(Root.open(sys.argv[1], create=False))
lock.acquire()
print("held", flush=True)
input()
"""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root.open(tmp_path / "root", create=True)


def holder(root: Root) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_writer_is_refused_and_told_the_first_ones_pid(root: Root) -> None:
    child = holder(root)
    with pytest.raises(RootLocked, match=f"pid {child.pid}"):
        RootLock(root).acquire()
    child.communicate("\n")
    with RootLock(root) as lock:
        assert lock.held


def test_a_writer_without_a_daemon_is_not_offered_as_one(root: Root) -> None:
    child = holder(root)
    with pytest.raises(RootLocked, match="saves to this root without a daemon") as caught:
        RootLock(root).acquire()
    child.communicate("\n")
    assert f"pid {child.pid}" in caught.value.seen
    assert "attach" not in str(caught.value) and "ckptd stop" not in str(caught.value)


def test_another_client_of_this_very_process_is_to_be_closed(root: Root) -> None:
    with RootLock(root), pytest.raises(RootLocked, match=r"this process already saves.*close\(\)"):
        RootLock(root).acquire()


def test_a_killed_holder_frees_the_lock(root: Root) -> None:
    child = holder(root)
    child.kill()
    child.communicate()
    with RootLock(root):
        pass


def test_a_running_daemon_is_named_with_its_endpoint(root: Root) -> None:
    pid, started = own_start()
    DaemonRecord(
        endpoint="ipc:///run/d.sock", pid=pid, pid_started=started, daemon_id="d", started_at=0.0, version="0"
    ).write(root)
    with RootLock(root), pytest.raises(RootLocked, match=f"pid {pid} at ipc:///run/d.sock"):
        RootLock(root).acquire()


def test_the_lock_file_stays(root: Root) -> None:
    path = root.service_dir / "lock"
    with RootLock(root):
        inode = path.stat().st_ino
    with RootLock(root):
        assert path.stat().st_ino == inode


@pytest.mark.parametrize("victim", ["lock", "."])
def test_removing_the_lock_file_or_its_folder_lets_no_second_writer_in(root: Root, victim: str) -> None:
    child = holder(root)
    (root.service_dir / "lock").unlink()
    if victim == ".":
        shutil.rmtree(root.service_dir)
    again = Root.open(root.path, create=False)
    with pytest.raises(RootLocked):
        RootLock(again).acquire()
    assert not (root.service_dir / "lock").exists()  # who is refused makes nothing
    child.communicate("\n")
    with RootLock(again):
        pass


def test_a_removed_lock_file_is_made_again_by_its_holder_and_names_it(root: Root) -> None:
    pid, path = os.getpid(), root.service_dir / "lock"
    with RootLock(root) as lock:
        assert not lock.restore()
        path.unlink()
        assert lock.restore()
        assert named_holder(root) == pid
        with pytest.raises(RootLocked, match=f"pid {pid}"):
            RootLock(root).acquire()
    assert named_holder(root) is None


def test_where_a_folder_can_not_be_locked_the_file_alone_is_the_lock(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def on_nfs(fd: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", on_nfs)
    with RootLock(root), pytest.raises(RootLocked, match=f"pid {os.getpid()}"):
        RootLock(root).acquire()
    with RootLock(root):
        pass


def test_a_lock_on_a_file_that_was_replaced_is_no_lock(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root.service_dir / "lock"
    real, unlinked = os.open, []

    def open_then_lose(name: object, *args: object, **kwargs: object) -> int:
        fd = real(name, *args, **kwargs)  # type: ignore[arg-type]
        if name == str(path) and not unlinked:
            unlinked.append(path.rename(path.with_name("lost")))
            path.touch(0o600)
        return fd

    monkeypatch.setattr(os, "open", open_then_lose)
    lock = RootLock(root)
    lock.acquire()
    assert lock._fd is not None
    assert os.fstat(lock._fd).st_ino == path.stat().st_ino
    lock.release()


def test_a_second_lock_of_the_same_process_is_refused_and_releasing_twice_is_fine(root: Root) -> None:
    with RootLock(root) as lock:
        with pytest.raises(RootLocked):
            lock.acquire()
        with pytest.raises(RootLocked):
            RootLock(root).acquire()
    lock.release()
    assert not lock.held


def test_a_forked_child_neither_frees_the_lock_nor_holds_it_longer(root: Root) -> None:
    code = """
import os, sys
from ckptd.errors import RootLocked
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root
root = Root.open(sys.argv[1], create=False)
lock = RootLock(root)
lock.acquire()
wait, go = os.pipe()
ready, tell = os.pipe()
if os.fork() == 0:
    os.close(go)
    os.write(tell, b"x")
    os.read(wait, 1)  # lives on after its parent let the lock go
    os._exit(0)
os.read(ready, 1)
try:
    RootLock(root).acquire()
    print("freed by the child")
except RootLocked:
    print("still held")
lock.release()
with RootLock(root):
    print("free while the child lives")
os.close(go)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(root.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["still held", "free while the child lives"]


def test_a_spawned_child_does_not_inherit_the_lock(root: Root) -> None:
    lock = RootLock(root)
    lock.acquire()
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    lock.release()
    with RootLock(root):
        pass
    child.communicate(b"\n")
