"""`python -m ckptd_daemon --root DIR`: the daemon as a client or `ckptd start --detach` starts it.

Its standard streams are its log's. Flags are in plain units; the command line people use is `ckptd start`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptd.errors import NO_SPACE, CkptdError, NoSpace
from ckptd_daemon.core.daemon_settings import DEFAULT_GRACE_S, DaemonSettings
from ckptd_daemon.core.process import run_daemon
from ckptd_daemon.series.budget import BUDGET_FLAGS
from ckptd_daemon.series.policy import RetentionPolicy, parse_monitor


def main(argv: Sequence[str]) -> int:
    """Run one daemon and return its exit code; an error is one line on stderr."""
    try:
        return run_daemon(_settings(_parser().parse_args(argv)))
    except CkptdError as error:
        _say(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    except OSError as error:
        _say(f"{error}\n")
        return NoSpace.exit_code if error.errno in NO_SPACE else 1


def _say(line: str) -> None:
    """Unbuffered: where there is no room for it in the log, the exit code still says it."""
    with contextlib.suppress(OSError):
        os.write(2, line.encode("utf-8", "backslashreplace"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckptd_daemon", allow_abbrev=False)
    parser.add_argument("--root", required=True)
    parser.add_argument("--autostarted", action="store_true")
    parser.add_argument("--grace-s", type=float, default=DEFAULT_GRACE_S)
    parser.add_argument("--idle-exit-s", type=float)
    parser.add_argument("--run", help="the run the policy is for; all without one")
    parser.add_argument("--keep-last", type=int)
    parser.add_argument("--keep-best", type=int)
    parser.add_argument("--monitor")
    for flag in BUDGET_FLAGS:
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--max-write-rate", type=int)
    parser.add_argument("--scrub-every-s", type=int)
    parser.add_argument("--listen")
    return parser


def _settings(args: argparse.Namespace) -> DaemonSettings:
    policy = None
    if (args.keep_last, args.keep_best, args.monitor) != (None, None, None):
        monitor, mode = parse_monitor(args.monitor) if args.monitor is not None else (None, None)
        given = {"keep_last": args.keep_last, "keep_best": args.keep_best}
        counts = {name: value for name, value in given.items() if value is not None}
        policy = RetentionPolicy(**counts, monitor=monitor, mode=mode)
    return DaemonSettings(
        root=Path(args.root), autostarted=args.autostarted, quiet=True, grace_s=args.grace_s,
        idle_exit_s=args.idle_exit_s, policy=policy, policy_run=args.run, budget=_budget(args),
        max_write_rate=args.max_write_rate, scrub_every_s=args.scrub_every_s, listen=args.listen,
    )  # fmt: skip


def _budget(args: argparse.Namespace) -> dict[str, int | None]:
    """What was given of it; 0 is none."""
    names = [flag.replace("-", "_") for flag in BUDGET_FLAGS]
    given = {name: getattr(args, name) for name in names}
    return {name: value or None for name, value in given.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
