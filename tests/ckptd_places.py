"""Private folders for a test that runs clients and daemons, and the processes it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.disk.rootdir import DaemonRecord, Root, process_started


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Path]:
    """A root's path; sockets and slots lie in folders of this test alone, and its daemons end with it."""
    with private_places(tmp_path / "root") as root:
        yield root


@contextmanager
def private_places(root: Path) -> Iterator[Path]:
    """The same for as long as the context: for several tests that share a daemon."""
    runtime = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/tmp"))  # short: a socket's path has 107 bytes
    shm = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CKPTD_RUNTIME_DIR", str(runtime))
            patch.setenv("CKPTD_SHM_DIR", str(shm))
            try:
                yield root
            finally:
                end_daemon(root)
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def daemon_of(root: Path) -> DaemonRecord | None:
    """The live daemon of a root."""
    record = DaemonRecord.read(Root.for_reading(root)) if root.is_dir() else None
    return record if record is not None and record.alive() else None


def end_daemon(root: Path) -> None:
    """Kill the daemon that daemon.json names, if there is one, and wait until it is gone."""
    record = daemon_of(root)
    if record is None or record.pid == os.getpid():
        return
    os.kill(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while process_started(record.pid) == record.pid_started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
