"""Arguments that many commands share: flag, then CKPTD_* in the environment, then a default."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ckptd import names
from ckptd.disk.rootdir import Root
from ckptd.errors import InvalidArgument, NoDaemon, NothingThere
from ckptd_daemon.series import policy


def text(args: argparse.Namespace, flag: str) -> tuple[str, str] | None:
    """(value, where it came from) of `--flag` or CKPTD_FLAG; None without both. An empty one is none."""
    value = getattr(args, flag.replace("-", "_"), None)
    if value is not None:
        return str(value), f"--{flag}"
    variable = "CKPTD_" + flag.replace("-", "_").upper()
    value = os.environ.get(variable)
    return (value, variable) if value else None


def root(args: argparse.Namespace) -> Path:
    """The root, absolute, neither created nor looked at.

    Raises:
        InvalidArgument: It wasn't named.
    """
    given = text(args, "root")
    if given is None or not given[0] or "\0" in given[0]:
        raise InvalidArgument("no root given", todo="say which with --root DIR or CKPTD_ROOT")
    return Path(given[0]).absolute()


def root_to_read(args: argparse.Namespace) -> Root:
    """The root, for a question about what lies there.

    Raises:
        NothingThere: There is no such folder.
        BadRoot: It is a file.
    """
    path = root(args)
    if not os.path.lexists(path):
        raise NothingThere("no such folder", where=str(path), todo="check --root")
    return Root.for_reading(path)


def root_with_daemon(args: argparse.Namespace) -> Root:
    """The root, for a question to its daemon.

    Raises:
        NoDaemon: There is no such folder, so nobody serves it.
        BadRoot: It is a file.
    """
    path = root(args)
    if not os.path.lexists(path):
        raise NoDaemon(
            "no daemon serves this root", where=str(path), seen="no such folder",
            todo=f"check --root, or start one with: ckptd start --root {path} --detach",
        )  # fmt: skip
    return Root.for_reading(path)


def run(args: argparse.Namespace) -> str:
    """The run's name, checked; "default" when it wasn't named."""
    return run_or_all(args) or names.DEFAULT_RUN


def run_or_all(args: argparse.Namespace) -> str | None:
    """The run's name, checked; None when it wasn't named."""
    given = text(args, "run")
    return None if given is None else names.check_run_name(given[0])


def duration_s(args: argparse.Namespace, flag: str, default: float) -> float:
    """Seconds of a duration flag."""
    given = text(args, flag)
    return default if given is None else policy.parse_duration_s(given[0], where=given[1])
