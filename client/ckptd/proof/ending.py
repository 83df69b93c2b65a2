"""A SIGTERM while a check runs: its runs are killed and its folder is removed first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Ended(BaseException):
    """Goes through every `finally`; nobody catches it but who made it."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Let SIGTERM, where it would end this process at once, end it after the block has cleaned up.

    The process ends by the signal all the same, so whoever waits for it sees the same. A handler that is there
    already stays, and outside of the main thread, where none can be set, nothing is done.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    except _Ended:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, _frame: Any) -> None:
    # `timeout` sends it twice: the second must not cut the cleaning short.
    signal.signal(number, signal.SIG_IGN)
    raise _Ended
