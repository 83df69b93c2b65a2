"""A real daemon for tests, started and spoken to by the real command line; nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.names import INDEX_FILE, NEWEST_FILE, RECENT_FILE
from paths_below import paths_below
from told_signals import hearing_ctrl_c

TIMEOUT_S = 100.0


def ckptd(*argv: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, as a process of its own."""
    command = [sys.executable, "-m", "ckptd_daemon.cli.main", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **how)  # type: ignore[call-overload, no-any-return]


def record_of(root: Path) -> DaemonRecord | None:
    """Who serves the root now; None when nobody does."""
    record = DaemonRecord.read(Root.for_reading(root)) if root.is_dir() else None
    return record if record is not None and record.alive() else None


@contextlib.contextmanager
def foreground(root: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """`ckptd start` in the foreground, ready; killed at the end if it is still there."""
    command = [sys.executable, "-u", "-m", "ckptd_daemon.cli.main", "start", "--root", str(root), *argv]
    with hearing_ctrl_c():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: record_of(root) is not None or process.poll() is not None)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextlib.contextmanager
def detached(root: Path, *argv: str) -> Iterator[DaemonRecord]:
    """`ckptd start --detach`; killed at the end if it is still there."""
    done = ckptd("start", "--detach", "--root", root, *argv)
    assert done.returncode == 0, done.stderr
    record = record_of(root)
    assert record is not None
    try:
        yield record
    finally:
        end(root)


def end(root: Path) -> None:
    """Kill whichever daemon serves the root."""
    if (record := record_of(root)) is not None:
        os.kill(record.pid, signal.SIGKILL)
        wait_until(lambda: not record.alive())


def wait_until(true: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for an event that has no better sign."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it didn't happen"
        time.sleep(0.01)


def files_of_run(run_dir: Path) -> dict[str, bytes | str]:
    """files_below of a run, less what its daemon sums up there whenever it comes to it, by way of a temporary name."""
    caches = {str(run_dir / name) for name in (INDEX_FILE, RECENT_FILE, NEWEST_FILE)}
    on_their_way = str(run_dir / ".tmp-0-")
    found = files_below(run_dir).items()
    return {path: what for path, what in found if path not in caches and not path.startswith(on_their_way)}


def files_below(folder: Path) -> dict[str, bytes | str]:
    """Every name below a folder with its content: equal before and after means that nothing was changed."""
    found: dict[str, bytes | str] = {}
    for path in paths_below(folder):
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            found[str(path)] = path.read_bytes() if path.is_file() else f"mode {path.lstat().st_mode:o}"
    return found
