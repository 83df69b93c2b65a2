"""Signals to processes of a test, so that they have arrived, and arrive at all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """A process started meanwhile can be interrupted, also when whoever runs the tests ignores SIGINT.

    nohup and the background of a shell script ignore it, and a program that is started inherits that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stop(pid: int, timeout_s: float = 60.0) -> None:
    """SIGSTOP, and wait until every thread has stopped: kill() returns before that."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while not all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "it doesn't stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "T"  # a thread that has ended meanwhile does nothing any more
