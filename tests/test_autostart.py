"""Starting a daemon: it comes up once, says why it didn't, and inherits nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import NoDaemon, RootLocked, TimedOut
from ckptd.link import autostart
from ckptd.link.autostart import start_daemon
from ckptd.link.connection import connect
from ckptd_places import daemon_of, end_daemon, places
from fake_daemon import wait_until
from locked_out import over_once_locked_out
from told_signals import stop

__all__ = ["places"]


@pytest.fixture
def root(places: Path) -> Root:
    return Root.open(places, create=True)


def test_it_is_there_when_the_call_returns_and_a_second_call_finds_it(root: Root) -> None:
    record = start_daemon(root, timeout_s=60)
    connect(root, timeout_s=60).close()
    assert start_daemon(root, timeout_s=60) == record


def test_it_inherits_no_descriptor_no_group_and_no_folder(root: Root) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        record = start_daemon(root, timeout_s=60)
    finally:
        os.close(writing)
    assert os.read(reading, 1) == b""  # the end of file comes: nobody else holds the writing end
    os.close(reading)
    assert os.getsid(record.pid) == record.pid != os.getsid(0)
    assert os.readlink(f"/proc/{record.pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{record.pid}/fd/1") == str(root.service_dir / "daemon.log")


def test_two_at_once_end_with_one_daemon_and_both_succeed(root: Root) -> None:
    found: list[DaemonRecord] = []
    threads = [
        threading.Thread(target=lambda: found.append(start_daemon(root, timeout_s=60))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len({record.daemon_id for record in found}) == 1
    # Those that lost leave by themselves; one still starting would take the root once this daemon is ended.
    wait_until(lambda: sum(process.poll() is None for process in autostart._started) <= 1)


def test_a_daemon_that_ends_at_once_is_said_with_the_end_of_its_log(root: Root) -> None:
    with pytest.raises(NoDaemon, match=r"exit code 2.*--no-such-flag"):
        start_daemon(root, timeout_s=60, extra_args=["--no-such-flag"])


@pytest.mark.slow
@pytest.mark.slow
def test_a_daemon_that_somebody_kills_at_its_start_is_followed_by_another(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "try:\n"
        f"    os.close(os.open({str(tmp_path / 'killed')!r}, os.O_CREAT | os.O_EXCL))\n"
        "except FileExistsError:\n"
        "    pass\n"
        "else:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    record = start_daemon(root, timeout_s=60)
    assert (tmp_path / "killed").exists() and daemon_of(root.path) == record


def test_a_lock_that_somebody_else_holds_is_said_when_the_bound_has_passed(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_once_locked_out(monkeypatch, autostart)
    with RootLock(root), pytest.raises(RootLocked, match='daemon="off"'):
        start_daemon(root, timeout_s=100)


def test_a_stopped_daemon_is_said_to_be_stopped(root: Root) -> None:
    stop(start_daemon(root, timeout_s=60).pid)
    with pytest.raises(TimedOut, match=r"stopped.*kill -CONT"):
        start_daemon(root, timeout_s=0.5)


def test_the_record_of_a_dead_daemon_is_no_obstacle(root: Root) -> None:
    first = start_daemon(root, timeout_s=60)
    end_daemon(root.path)
    second = start_daemon(root, timeout_s=60)
    assert second.daemon_id != first.daemon_id
    assert daemon_of(root.path) == second


def test_a_relative_import_path_and_a_module_in_the_working_folder_do_not_mislead_it(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", *filter(None, [os.environ.get("PYTHONPATH")])]))
    record = start_daemon(root, timeout_s=60)
    environment = Path(f"/proc/{record.pid}/environ").read_bytes().split(b"\0")
    paths = next(one for one in environment if one.startswith(b"PYTHONPATH=")).partition(b"=")[2]
    assert paths.split(os.pathsep.encode())[0] == os.fsencode(tmp_path / "lib")
