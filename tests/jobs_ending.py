"""Jobs for check_resume that leave something behind, or end in a way of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jobs_exact import build, seed, train

Job = tuple[dict[str, Any], Iterator[Any]]


def whole() -> Job:
    seed()
    state = build()
    return state, train(state)


def forks() -> Job:
    """The copy leaves as a process does, by SystemExit."""
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    return whole()


def leaves_a_thread() -> Job:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return whole()


def leaves_a_session() -> Job:
    stays = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(f"pid {stays.pid}", flush=True)
    return whole()
