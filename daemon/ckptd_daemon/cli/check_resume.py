"""`ckptd check-resume`: whether a user's job resumes bit for bit. The job runs in processes of its own."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from ckptd.errors import InvalidArgument, JobFailed, TimedOut
from ckptd.proof.checking import check_resume
from ckptd_daemon.cli import arguments, output, units

_DEFAULT_TIMEOUT_S = 600.0


def run(args: argparse.Namespace) -> int:
    """Print the report: 0 when every resumed run is the uninterrupted one, 1 when not."""
    steps, cuts = units.parse_count(args.steps, "--steps", least=2), _cuts(args.cuts)
    timeout_s = arguments.duration_s(args, "timeout", _DEFAULT_TIMEOUT_S)
    # As `python -m` does: what lies in the current folder can be imported. Its end must still be an orderly one.
    sys.path.insert(0, str(Path.cwd()))
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        report = check_resume(
            args.job, steps=steps, cuts=cuts, timeout_s=timeout_s, keep=args.keep, progress=output.note
        )
    except (JobFailed, TimedOut) as error:
        sys.stderr.write("".join(f"{note}\n" for note in getattr(error, "__notes__", ())))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json:
        output.emit_json("ckpt.v2-check-resume", report.as_json())
    else:
        output.emit("".join(f"{output.printable(line)}\n" for line in str(report).splitlines()))
    return 0 if report.exact else 1


def _cuts(given: Sequence[str] | None) -> Sequence[int] | Literal["all"] | None:
    if given is None:
        return None
    if "all" not in given:
        return [units.parse_count(text, "--cut", least=1) for text in given]
    if len(given) > 1:
        raise InvalidArgument(
            "all steps and some of them", where="--cut", seen=" ".join(given), wanted="one or the other"
        )
    return "all"


def _leave(number: int, _frame: Any) -> NoReturn:
    # `timeout` sends it twice: the second must not cut the cleaning short.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)  # through every finally: the child is killed, the folder removed
