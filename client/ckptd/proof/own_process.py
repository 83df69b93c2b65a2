"""What the process of a run does to itself before the job: how it dies, what it shows, where its sockets lie."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ckptd.errors import CheckpointWarning
from ckptd.proof import trace

_PR_SET_PDEATHSIG: Final = 1
_SOCKET_FOLDER: Final = 80  # bytes of a path; a longer one leaves no room for a socket's name in 108
_WARNING: Final = 1000  # characters of one that are told


def die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it could be watched
        os.kill(os.getpid(), signal.SIGKILL)


def show_stacks_at(time_s: float) -> None:
    """All threads, to stderr, which is the log: where a job hangs is what its reader wants to know.

    A fork doesn't get it: the thread that waits wouldn't be in the copy, whose exit would wait for that thread.
    """

    def arm() -> None:
        faulthandler.dump_traceback_later(max(0.1, time_s - time.monotonic()), exit=False)

    arm()
    os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=arm)


def tell_warnings(write: Callable[[str], Any]) -> None:
    """What ckptd warns of goes into the trace too: its reader is shown no log."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
        if issubclass(category, CheckpointWarning):
            write(trace.line("warned", text=str(message)[:_WARNING]))
        shown(message, category, *where, **how)

    warnings.showwarning = show


def keep_sockets_in(folder: Path) -> None:
    """Those of multiprocessing lie where they go with the check: after a SIGKILL nobody else removes them."""
    if len(os.fsencode(folder)) <= _SOCKET_FOLDER:
        folder.mkdir(mode=0o700, exist_ok=True)
        multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
