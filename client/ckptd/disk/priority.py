"""CPU priority of what writes and hashes beside a training: below it, unless somebody waits.

On Linux nice belongs to a thread, and the priority of its I/O follows from it. A thread that has lowered itself
can't go back up without privileges, so urgent work is done by other threads (`ckptd.disk.crew`).

Where the kernel shares CPUs between sessions first ("autogroup": on most desktops, and in many containers), nice
counts only inside a session, and a daemon in a session of its own would get as much CPU as all of the training.
There the nice of the session is raised too, from the first such work on and but for the times when somebody waits: all
of the daemon is in it, and while every CPU is busy its loop may then be late by a tenth of a second. Raised as the work
begins it comes too late: measured (Linux 6.18), of every other save the work had all CPUs for 80 ms more.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOWEST: Final = 19
#: A thirtieth of a CPU that others want. Least of all would be a seventieth: then the loop could be late by 0.2 s.
_SESSION_BACK: Final = 15
_AUTOGROUP: Final = Path("/proc/self/autogroup")


class Urgency:
    """Whether somebody waits for what is being written.

    Args:
        urgent: How it begins.
        step_back: Called with True when work begins, or goes on, that nobody waits for, with False when somebody waits.
            Whether it could be done; if not, it is tried again with the next call of set().

    Attributes:
        now: Whether somebody waits.
        changed: Notified at each change; also the lock of those who wait for it.
    """

    def __init__(self, urgent: bool = True, step_back: Callable[[bool], bool] = lambda _back: True) -> None:
        self.changed = threading.Condition()
        self.now, self._step_back = urgent, step_back
        self._works = self._back = False

    def set(self, urgent: bool) -> bool:
        """Say how it is now. False when step_back couldn't be done (yet)."""
        with self.changed:
            if urgent != self.now:
                self.now = urgent
                self.changed.notify_all()
            return self._look()

    def work_begins(self) -> None:
        """Something large is written, read or hashed, and more of that will be."""
        with self.changed:
            self._works = True
            # Said again: who waited, until just now, may have had it step forward (have_step_forward).
            if not self.now:
                self._back = False
            self._look()

    def _look(self) -> bool:
        back = self._works and not self.now
        if back != self._back and self._step_back(back):
            self._back = back
        return self._back == back


def lower_this_thread() -> None:
    """Give the calling thread the lowest priority, for good. Where that is refused it stays as it is."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def step_back_session(back: bool) -> bool:
    """Give way to other sessions, or no longer, when this process leads its own: then all in it is ours.

    Coming back needs no privileges. False when the kernel won't have it changed again so soon.
    """
    if os.getsid(0) != os.getpid():
        return True
    try:
        _AUTOGROUP.write_text(str(_SESSION_BACK if back else 0))
    except BlockingIOError:
        return False
    except OSError:
        return True  # there are no autogroups here
    return True


def have_step_forward(pid: int) -> None:
    """Have the session of another process of ours no longer give way: this one waits for it.

    It would itself, once it has read that; but while it gives way on a busy machine it may get no CPU to read with.
    """
    group = Path(f"/proc/{pid}/autogroup")
    with contextlib.suppress(OSError):
        if group.read_text().split()[-1:] == [str(_SESSION_BACK)]:
            group.write_text("0")
