"""Threads kept off the CPU of the one that they help.

A kernel wakes a thread on the CPU of the one that woke it unless it sees a better one idle, and in a virtual machine it
doesn't: an idle CPU there has been given back to the host. So a helper that is asked is put where the caller copies, and
gets the CPU when that copy is over. Measured on two CPUs, after a wait of 20 ms: it began 1.8 ms after it was asked, half
a copy late; kept off, 0.07. The caller stays free: bound to its CPU it would wait there behind whatever else has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence

__all__ = ["OtherCpus", "this_cpu"]

_libc = ctypes.PyDLL(None)  # a call that takes no time keeps the interpreter's lock


def this_cpu() -> int:
    """The number of the CPU that the calling thread runs on now; -1 where that can't be told."""
    return int(_libc.sched_getcpu())


class OtherCpus:
    """Some threads' CPUs. Safe for use by several threads at once: what each asks for is right for itself."""

    def __init__(self) -> None:
        self._told: tuple[set[int], int] = (set(), 0)

    def keep_off_this(self, threads: Sequence[threading.Thread]) -> None:
        """From now on they run on the CPUs that the calling thread may use, but for the one it is on.

        Where it may use no other, or the system refuses, nobody is moved.

        Args:
            threads: Started ones; if more than at the last call, the same and new ones at the end.
        """
        allowed = os.sched_getaffinity(0)
        others = allowed - {this_cpu()}
        if not others or others == allowed or self._told == (others, len(threads)):
            return
        for number in [thread.native_id for thread in threads if thread.native_id]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(number, others)
        self._told = (others, len(threads))
