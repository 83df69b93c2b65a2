"""`python -m ckptd_daemon --root DIR`: the daemon as a client or `ckptd start --detach` starts it.

Its standard streams are its log's. Flags are in plain units; the command line people use is `ckptd start`, whose
parser a daemon would keep in memory for all its life.
"""

from __future__ import annotations

import contextlib
import getopt
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ckptd.errors import NO_SPACE, CkptdError, InvalidArgument, NoSpace
from ckptd_daemon.core.daemon_settings import DEFAULT_GRACE_S, DaemonSettings
from ckptd_daemon.core.process import run_daemon
from ckptd_daemon.series.budget import BUDGET_FLAGS
from ckptd_daemon.series.policy import RetentionPolicy, parse_monitor

_TEXTS: Final = ("root", "run", "monitor", "listen")  #: run: the one the policy is for; all without it
_SECONDS: Final = ("grace-s", "idle-exit-s")
_COUNTS: Final = ("keep-last", "keep-best", *BUDGET_FLAGS, "max-write-rate", "scrub-every-s")


def main(argv: Sequence[str]) -> int:
    """Run one daemon and return its exit code; an error is one line on stderr."""
    try:
        return run_daemon(_settings(argv))
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


def _settings(argv: Sequence[str]) -> DaemonSettings:
    """Raises InvalidArgument for a flag that isn't one, or isn't what it should be."""
    try:
        given, rest = getopt.getopt(
            list(argv), "", ["autostarted", *(f"{name}=" for name in (*_TEXTS, *_SECONDS, *_COUNTS))]
        )
        flags = {name[2:]: value for name, value in given}
        texts = {name: flags[name] for name in _TEXTS if name in flags}
        seconds = {name: float(flags[name]) for name in _SECONDS if name in flags}
        counts = {name: int(flags[name]) for name in _COUNTS if name in flags}
        root = Path(texts["root"])
    except (getopt.GetoptError, ValueError, KeyError) as error:
        raise InvalidArgument("not the daemon's flags", seen=f"{' '.join(argv)} ({error})") from error
    if rest:
        raise InvalidArgument("not the daemon's flags", seen=" ".join(rest))
    return DaemonSettings(
        root=root, autostarted="autostarted" in flags, quiet=True, grace_s=seconds.get("grace-s", DEFAULT_GRACE_S),
        idle_exit_s=seconds.get("idle-exit-s"), policy=_policy(counts, texts.get("monitor")),
        policy_run=texts.get("run"), budget=_budget(counts), max_write_rate=counts.get("max-write-rate"),
        scrub_every_s=counts.get("scrub-every-s"), listen=texts.get("listen"),
    )  # fmt: skip


def _policy(counts: Mapping[str, int], monitored: str | None) -> RetentionPolicy | None:
    kept = {name.replace("-", "_"): counts[name] for name in ("keep-last", "keep-best") if name in counts}
    if not kept and monitored is None:
        return None
    monitor, mode = parse_monitor(monitored) if monitored is not None else (None, None)
    return RetentionPolicy(**kept, monitor=monitor, mode=mode)


def _budget(counts: Mapping[str, int]) -> dict[str, int | None]:
    """What was given of it; 0 is none."""
    return {name.replace("-", "_"): counts[name] or None for name in BUDGET_FLAGS if name in counts}
