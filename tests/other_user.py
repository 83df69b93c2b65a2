"""What another user of the machine can do, tried by really being one; only root can."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def another_user(work: Callable[[], object]) -> Iterator[str]:
    """Have `work` done by a forked process of another user; what it returned, or the error's name, is handed in.

    The process stays, with all that it opened, until this ends.
    """
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_another(work, say)
    os.close(say)
    try:
        answer = b""
        while chunk := os.read(said, 65536):
            answer += chunk
        yield answer.decode()
    finally:
        os.close(said)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_another(work: Callable[[], object], say: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            answer = str(work())
        except Exception as error:
            answer = type(error).__name__
        os.write(say, answer.encode())
        os.close(say)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def as_another_user(work: Callable[[], object]) -> str:
    """What it returned, or the name of the error."""
    with another_user(work) as answer:
        return answer
