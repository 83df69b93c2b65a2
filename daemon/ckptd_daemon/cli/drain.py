"""`ckptd drain`: wait until everything the daemon has accepted so far is durable."""

from __future__ import annotations

import argparse
from typing import Final

from ckptd.errors import SaveFailed
from ckptd.link import wire
from ckptd.link.connection import connect
from ckptd_daemon.cli import arguments, output

DEFAULT_TIMEOUT_S: Final = 300.0


def run(args: argparse.Namespace) -> int:
    """Wait; SaveFailed when a snapshot failed, TimedOut when the bound passes (draining goes on)."""
    run_name = arguments.run_or_all(args)
    timeout_s = arguments.duration_s(args, "timeout", DEFAULT_TIMEOUT_S)
    connection = connect(arguments.root_with_daemon(args), timeout_s=min(timeout_s, 10.0))
    try:
        message = wire.Drain(id=0, run=run_name, verified=args.verified)
        drained = connection.ask(message, wire.Drained, timeout_s)
    finally:
        connection.close()
    if drained.failed:
        raise SaveFailed(
            "not everything could be saved", where=str(connection.root.path),
            seen=f"{drained.failed} snapshots failed", todo=f"see {connection.record.log}",
        )  # fmt: skip
    output.note("everything accepted so far is " + ("verified" if args.verified else "committed"))
    return 0
