"""At which priority the verifier works: the lowest, unless somebody waits."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Final

from ckptd.disk.crew import do_all
from ckptd.disk.priority import Urgency, step_back_session

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
        self.urgency = Urgency(False, step_back_session)

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
