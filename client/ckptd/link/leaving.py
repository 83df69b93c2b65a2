"""How a client ends when nobody closes it: with the script, dropped, or in a forked child."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref

from ckptd.link.failures import Failures
from ckptd.link.writers import Writer

__all__ = ["leave_at_end"]

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def leave_at_end(
    client: object, writer: Writer, failures: Failures, timeout_s: float
) -> weakref.finalize[..., object]:
    """Close `writer` when the client is dropped or the interpreter ends, waiting at most `timeout_s`.

    What couldn't be saved is then said on stderr, whatever the warning filters: there is no caller left to
    raise it to. Detach what is returned when the client is closed. In a forked child nothing happens at all.
    """
    _writers.add(writer)
    return weakref.finalize(client, _leave, writer, failures, timeout_s, os.getpid())


def _leave(writer: Writer, failures: Failures, timeout_s: float, pid: int) -> None:
    if os.getpid() != pid:
        return
    if writer.interrupts_copy() or threading.current_thread().name.startswith("ckptd-"):
        # The garbage collector came by in the middle of a copy, which waits for this call as this call would for it.
        # The interpreter's end waits for a thread that is no daemon.
        with contextlib.suppress(RuntimeError):  # no thread to be had
            leaving = threading.Thread(target=_close, args=(writer, failures, timeout_s), name="leaving")
            leaving.start()
            return
    _close(writer, failures, timeout_s)


def _close(writer: Writer, failures: Failures, timeout_s: float) -> None:
    began = time.monotonic()
    writer.close(timeout_s)
    for text in failures.take():
        sys.stderr.write(f"ckptd: {text} (waited {time.monotonic() - began:.1f} s at the end)\n")


def _abandon_in_child() -> None:
    for writer in list(_writers):
        writer.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
