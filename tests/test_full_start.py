"""A daemon that can't start because the disk is full: one exit code, with the path and what is free."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.disk import durable
from ckptd.disk.rootdir import Root
from ckptd.disk.too_full import no_space
from ckptd.errors import NoDaemon, NoSpace
from ckptd.link.autostart import DaemonStart
from ckptd.link.session import Session
from ckptd_places import places
from daemon_parts import new_client_id
from real_disks import disk

__all__ = ["places"]


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_error_names_the_file_and_what_is_free(tmp_path: Path) -> None:
    error = full()
    error.filename = str(tmp_path / "daemon.json")
    said = no_space(tmp_path, error)
    assert said.where == str(tmp_path / "daemon.json") and "No space left" in said.seen
    assert "free on its file system" in said.seen and "free on its file system" in no_space(tmp_path).seen


def test_a_file_that_cant_be_replaced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_all(*_: object) -> int:
        raise full()

    monkeypatch.setattr(durable, "write_all", write_all)
    with pytest.raises(OSError) as caught:
        durable.replace_file(tmp_path / "x.json", [b"x"], sync=False)
    assert caught.value.filename == str(tmp_path / "x.json") and not list(tmp_path.iterdir())


def test_for_a_job_that_runs_it_is_one_of_the_ways_to_have_no_daemon(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(self: DaemonStart, timeout_s: float = 0.0) -> None:
        self._ended(NoSpace.exit_code)

    monkeypatch.setattr(DaemonStart, "ready", ready)
    session = Session(Root.open(places, create=True), "r", new_client_id(), "auto")
    with pytest.raises(NoSpace):
        session.open(1.0)
    session.epoch, session._not_before = 1, 0.0
    assert not session.attach(0.0) and type(session.trouble) is NoDaemon
    session.close()


@pytest.mark.slow
def test_detached_or_not_it_exits_with_8(places: Path) -> None:
    with disk(places.with_name("disk"), "tmpfs", "size=256k") as small:
        root = small.path / "root"
        Root.open(root, create=True)
        small.fill(0)
        for more in ([], ["--detach"]):
            command = [sys.executable, "-m", "ckptd_daemon.cli.main", "start", "--root", str(root), *more]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 8, done.stderr
            assert str(root) in done.stderr and "free on its file system" in done.stderr
