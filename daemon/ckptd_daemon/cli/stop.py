"""`ckptd stop`: drain, stop, and wait until the process is gone."""

from __future__ import annotations

import argparse
import time
from typing import Final

from ckptd.errors import NoDaemon, TimedOut
from ckptd.link import wire
from ckptd.link.connection import Connection, connect
from ckptd_daemon.cli import arguments, output

DEFAULT_GRACE_S: Final = 0.0
EXTRA_S: Final = 60.0  # for what is still queued, on top of the grace
_ANSWER_S: Final = 10.0
_LOOK_S: Final = 0.02


def run(args: argparse.Namespace) -> int:
    """Stop the daemon of the root; NoDaemon when there is none, TimedOut when it is still there."""
    grace_s = arguments.duration_s(args, "grace", DEFAULT_GRACE_S)
    timeout_s = arguments.duration_s(args, "timeout", grace_s + EXTRA_S)
    deadline = time.monotonic() + timeout_s
    connection = connect(arguments.root_with_daemon(args), timeout_s=min(timeout_s, _ANSWER_S))
    try:
        _ask(connection, grace_s, deadline)
        _wait_until_gone(connection, deadline, timeout_s)
    finally:
        connection.close()
    output.note(f"the daemon (pid {connection.record.pid}) has stopped")
    return 0


def _ask(connection: Connection, grace_s: float, deadline: float) -> None:
    try:
        connection.ask(wire.Stop(id=0, grace_s=grace_s), wire.Done, min(_left(deadline), _ANSWER_S))
    except NoDaemon:
        return  # it left before its answer was read: that is what was asked for


def _wait_until_gone(connection: Connection, deadline: float, timeout_s: float) -> None:
    while connection.record.alive():
        if _left(deadline) <= 0:
            record = connection.record
            raise TimedOut(
                "the daemon was asked to stop but is still there", where=str(connection.root.path),
                seen=f"pid {record.pid} after {timeout_s:g} s", todo=f"it stops by itself; see {record.log}",
            )  # fmt: skip
        time.sleep(_LOOK_S)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
