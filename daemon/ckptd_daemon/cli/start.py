"""`ckptd start`: the daemon of a root, here in the foreground or detached."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Final

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import InvalidArgument, RootLocked
from ckptd_daemon.cli import arguments, output, units
from ckptd_daemon.series import policy, settings_file
from ckptd_daemon.series.budget import BUDGET_FLAGS
from ckptd_daemon.series.policy import RetentionPolicy

_COUNTS: Final = ("keep-last", "keep-best")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; with --detach, return when it is ready.

    Everything that can be wrong with the flags is found before anything on disk is touched.
    """
    root, run_name = arguments.root(args), arguments.run_or_all(args)
    rules = asked_policy(args, root, run_name)
    budget = asked_budget(args)
    times = {flag: arguments.text(args, flag) for flag in ("grace", "idle-exit")}
    seconds = {
        flag: policy.parse_duration_s(given[0], where=given[1]) for flag, given in times.items() if given
    }
    listen, rate, scrub = _listen(args), _rate(args), _scrub_every(args)
    if args.detach:
        flags = _flags(rules, run_name, seconds) + ([] if listen is None else [f"--listen={listen}"])
        flags += [] if rate is None else [f"--max-write-rate={rate}"]
        flags += [] if scrub is None else [f"--scrub-every-s={scrub}"]
        flags += [f"--{name.replace('_', '-')}={value or 0}" for name, value in budget.items()]
        return _detached(args, root, flags)
    if args.json or args.timeout is not None:
        raise InvalidArgument("--json and --timeout go with --detach", todo="add --detach or leave them out")
    return _foreground(root, run_name, rules, seconds, listen, budget, rate, scrub)


def _listen(args: argparse.Namespace) -> str | None:
    """The address to serve TCP at. Raises InvalidArgument for one that isn't of this machine's loopback."""
    from ckptd_daemon.core.loopback import check_listen

    given = arguments.text(args, "listen")
    if given is not None:
        check_listen(given[0])
    return None if given is None else given[0]


def _rate(args: argparse.Namespace) -> int | None:
    """Bytes per second to write at most; 0 for no bound, None when nothing is asked."""
    from ckptd.disk.write_rate import check_rate

    given = arguments.text(args, "max-write-rate")
    return None if given is None else check_rate(units.parse_bytes(*given), given[1]) or 0


def _scrub_every(args: argparse.Namespace) -> int | None:
    """Seconds within which to read everything again; 0 for never, None when nothing is asked."""
    from ckptd_daemon.verify.rota import check_every

    given = arguments.text(args, "scrub-every")
    if given is None:
        return None
    seconds = policy.parse_duration_s(given[0], where=given[1])
    return check_every(int(seconds) if seconds.is_integer() else seconds, given[1])


def asked_budget(args: argparse.Namespace) -> dict[str, int | None]:
    """What is asked of the budget, as fields of Budget: flag, then CKPTD_*; 0 is none."""
    given = {flag: arguments.text(args, flag) for flag in BUDGET_FLAGS}
    return {
        flag.replace("-", "_"): units.parse_bytes(*value) or None for flag, value in given.items() if value
    }


def asked_policy(args: argparse.Namespace, root: Path, run_name: str | None) -> RetentionPolicy | None:
    """The policy to write to the settings: flag, CKPTD_*, then what they say now; None when nothing is asked.

    Raises:
        InvalidArgument: A policy that can't be, or a settings file that can't be read.
    """
    settings = settings_file.read_settings(root) if root.is_dir() else settings_file.Settings()
    before = settings.policy if run_name is None else settings.policy_for(run_name)
    asked: dict[str, Any] = {}
    for flag in _COUNTS:
        if given := arguments.text(args, flag):
            asked[flag.replace("-", "_")] = units.parse_count(*given)
    if given := arguments.text(args, "monitor"):
        asked["monitor"], asked["mode"] = policy.parse_monitor(given[0])
    return dataclasses.replace(before, **asked) if asked else None


def _foreground(
    root: Path, run_name: str | None, rules: RetentionPolicy | None, seconds: dict[str, float],
    listen: str | None, budget: dict[str, int | None], rate: int | None, scrub: int | None,
) -> int:  # fmt: skip
    from ckptd_daemon.core.daemon_settings import DaemonSettings
    from ckptd_daemon.core.process import run_daemon

    settings = DaemonSettings(
        root=root, policy=rules, policy_run=run_name, listen=listen, budget=budget, max_write_rate=rate,
        scrub_every_s=scrub,
    )  # fmt: skip
    if "grace" in seconds:
        settings = dataclasses.replace(settings, grace_s=seconds["grace"])
    return run_daemon(dataclasses.replace(settings, idle_exit_s=seconds.get("idle-exit")))


def _detached(args: argparse.Namespace, path: Path, flags: list[str]) -> int:
    from ckptd.link.autostart import START_TIMEOUT_S, start_daemon

    timeout_s = arguments.duration_s(args, "timeout", START_TIMEOUT_S)
    root = Root.open(path, create=True)
    before = DaemonRecord.read(root)
    if before is not None and before.alive():
        raise RootLocked(
            "a daemon serves this root already", where=str(root.path),
            seen=f"pid {before.pid} at {before.endpoint}", todo="use it, or stop it with ckptd stop",
        )  # fmt: skip
    record = start_daemon(root, timeout_s=timeout_s, extra_args=flags, autostarted=False)
    facts = {"endpoint": record.endpoint, "pid": record.pid, "log": record.log}
    facts |= {"tcp": record.tcp} if record.tcp else {}
    if args.json:
        output.emit_json("ckpt.v2-start", {"root": str(root.path), **facts})
    else:
        output.emit("".join(f"{name} {output.printable(str(value))}\n" for name, value in facts.items()))
    return 0


def _flags(rules: RetentionPolicy | None, run_name: str | None, seconds: dict[str, float]) -> list[str]:
    """The same for `python -m ckptd_daemon`."""
    flags = [f"--{flag}-s={value!r}" for flag, value in seconds.items()]
    if rules is None:
        return flags
    flags += [f"--keep-last={rules.keep_last}", f"--keep-best={rules.keep_best}"]
    flags += [] if rules.monitor is None else [f"--monitor={rules.monitor}:{rules.mode}"]
    return flags + ([] if run_name is None else [f"--run={run_name}"])
