"""CPU priority of what writes and hashes beside a training: below it, unless somebody waits.

On Linux nice belongs to a thread, and the priority of its I/O follows from it. A thread that has lowered itself
can't go back up without privileges, so urgent work is done by other threads (`ckptd.disk.crew`).

Where the kernel shares CPUs between sessions first ("autogroup": on most desktops, and in many containers), nice
counts only inside a session, and a daemon in a session of its own would get as much CPU as all of the training.
So the session's own nice is lowered too, as long as nobody waits. Then, and only while all CPUs are busy, the
daemon's loop may be 0.2 s late as well.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOWEST: Final = 19
_AUTOGROUP: Final = Path("/proc/self/autogroup")


class Urgency:
    """Whether somebody waits for what is being written.

    Args:
        urgent: How it begins.
        told: Called with the new value after each change.

    Attributes:
        now: Whether somebody waits.
        changed: Notified at each change; also the lock of those who wait for it.
    """

    def __init__(self, urgent: bool = True, told: Callable[[bool], object] = lambda _urgent: None) -> None:
        self.changed = threading.Condition()
        self.now, self._told = urgent, told

    def set(self, urgent: bool) -> None:
        """Say how it is now."""
        if urgent == self.now:
            return
        with self.changed:
            self.now = urgent
            self.changed.notify_all()
        self._told(urgent)


def lower_this_thread() -> None:
    """Give the calling thread the lowest priority, for good. Where that is refused it stays as it is."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def set_session_nice(nice: int) -> None:
    """Set the nice of this process's session, when it is the session's leader: then all in it is ours.

    Args:
        nice: 0 to 19; coming back to 0 needs no privileges.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no autogroups here, or it was changed a moment ago
            _AUTOGROUP.write_text(str(nice))
