"""A real daemon in a process of its own, whose disk fails or stalls where and while a test says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ckptd_places import daemon_of
from fake_daemon import wait_until
from told_signals import hearing_ctrl_c

# The orders are read anew at each call, so that a test can withdraw them while the daemon runs.
_SCRIPT = """
import errno, fnmatch, os, sys, time
from pathlib import Path
from ckptd_daemon.core.command import main

orders, write, pwritev, mkdir, opens = Path(sys.argv.pop(1)), os.write, os.pwritev, os.mkdir, os.open

def obey(call, path):
    while True:
        try:
            order = orders.read_text()
            what, where, how = order.split()
        except (OSError, ValueError):
            return
        if what != call or not fnmatch.fnmatch(path, where):
            return
        if how == "slow":
            return time.sleep(0.05)
        if how != "stall":
            code = getattr(errno, how)
            raise OSError(code, os.strerror(code), path)
        orders.with_name("stalled").write_text(order)
        time.sleep(0.005)

def obedient_write(fd, data):
    obey("write", os.readlink(f"/proc/self/fd/{fd}"))
    return write(fd, data)

def obedient_pwritev(fd, *more):
    obey("write", os.readlink(f"/proc/self/fd/{fd}"))
    return pwritev(fd, *more)

def obedient_mkdir(path, *more, **options):
    obey("mkdir", os.fspath(path))
    return mkdir(path, *more, **options)

def obedient_open(path, flags, *more, dir_fd=None, **options):
    if flags & os.O_ACCMODE == os.O_RDONLY:
        folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        obey("read", os.path.join(folder, os.fspath(path)))
    return opens(path, flags, *more, dir_fd=dir_fd, **options)

os.write, os.pwritev, os.mkdir, os.open = obedient_write, obedient_pwritev, obedient_mkdir, obedient_open
sys.exit(main(sys.argv[1:]))
"""


class ObstructedDaemon:
    """What a test says to it."""

    def __init__(self, process: subprocess.Popen[bytes], orders: Path) -> None:
        self.process, self._orders = process, orders

    def obstruct(self, call: str, path: str, how: str) -> None:
        """From now on `call` of paths like `path` stalls ("stall"), takes 50 ms more ("slow") or fails (an errno).

        One order takes another's place at once: what stalls under the first is never let through between them.

        Args:
            call: "write", "mkdir", or "read": opening to read.
        """
        self._orders.with_name("stalled").unlink(missing_ok=True)
        draft = self._orders.with_name("draft")
        draft.write_text(f"{call} {path} {how}")
        draft.rename(self._orders)

    def clear(self) -> None:
        """The disk works again."""
        self._orders.unlink(missing_ok=True)
        self._orders.with_name("stalled").unlink(missing_ok=True)

    def wait_until_stalled(self) -> None:
        """Under the order of now."""
        order = self._orders.read_text()
        wait_until(lambda: self._stalled() == order)

    def _stalled(self) -> str:
        try:
            return self._orders.with_name("stalled").read_text()
        except FileNotFoundError:
            return ""


@contextmanager
def obstructed_daemon(
    root: Path, *flags: str, first: str = "", env: Mapping[str, str] | None = None
) -> Iterator[ObstructedDaemon]:
    """Serves `root`, as leader of its own process group; killed at the end if it is still there.

    `first`: an obstruction it begins with, "call path how"; `env`: what its environment has besides.
    """
    control = root.parent / f"{root.name}-orders"
    control.mkdir(exist_ok=True)
    if first:
        (control / "orders").write_text(first)
    command = [sys.executable, "-c", _SCRIPT, str(control / "orders"), "--root", str(root), *flags]
    with hearing_ctrl_c():
        process = subprocess.Popen(command, start_new_session=True, env=os.environ | dict(env or {}))
    with process:
        try:
            wait_until(lambda: daemon_of(root) is not None or process.poll() is not None)
            assert process.poll() is None
            yield ObstructedDaemon(process, control / "orders")
        finally:
            if process.poll() is None:
                process.kill()
