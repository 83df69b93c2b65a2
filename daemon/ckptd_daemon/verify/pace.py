"""At which priority the verifier works: the lowest, unless somebody waits."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

from ckptd.disk.crew import do_all
from ckptd.disk.priority import Urgency, step_back_session
from ckptd.limits import MIB

_LARGE_BYTES: Final = 128 * MIB
_AGAIN_S: Final = 0.05  #: the kernel has the priority of a session changed ten times a second at most
_TIMES: Final = 20


class Pace:
    """Of one process.

    The thread that reads at normal priority has that of the one that calls `check` or `background`: give it away, and
    it can't be had back.

    Attributes:
        urgency: For `check`.
    """

    def __init__(self) -> None:
        self.urgency = Urgency(False, self._step_back)
        self._large = False  # what is being read
        self._back = False  # the session has stepped back for that

    @property
    def hurried(self) -> bool:
        """Whether somebody waits."""
        return self.urgency.now

    def hurry(self, now: bool) -> None:
        """Somebody waits, or no longer. From any thread; may take a moment."""
        for _ in range(_TIMES):
            if self.urgency.set(now) or not now:
                return
            time.sleep(_AGAIN_S)

    def background(self, steps: Generator[None, None, Any]) -> Any:
        """Have this done by other threads, see `ckptd.disk.crew`; threads that those start have their priority."""
        return do_all([steps], self.urgency, name="ckptd-look")[0]

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """While this checkpoint is read. A small one is, before its session's stepping back would be noticed."""
        self._large = _bytes_in(path) >= _LARGE_BYTES
        try:
            with self.urgency.at_work():
                yield
        finally:
            self._large = False

    def _step_back(self, back: bool) -> bool:
        wanted = back and self._large
        if wanted != self._back and step_back_session(wanted):
            self._back = wanted
        return wanted == self._back


def _bytes_in(path: Path) -> int:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except OSError:
        return 0
