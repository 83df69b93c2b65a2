"""The commands and flags of `ckptd`. Importing this imports no part of ckptd that does anything."""

from __future__ import annotations

import argparse
from typing import Final, NoReturn

from ckptd.errors import InvalidArgument

#: command → module of this package whose `run(args) -> int` executes it
MODULES: Final = {
    "start": "start",
    "stop": "stop",
    "drain": "drain",
    "status": "status",
    "list": "listing",
    "latest": "latest",
    "show": "show",
    "verify": "verify",
    "migrate": "migrate",
    "check-resume": "check_resume",
}

_EPILOG = """\
SEL selects a checkpoint: latest, best, 1200 (a step), 1200.2 (its second commit) or a path.
flag > CKPTD_* in the environment > ROOT/.ckptd/ckptd.toml > default.
exit: 0 ok, 1 failed, 2 usage, 3 nothing there, 4 corrupt or none valid, 5 no daemon, 6 locked,
7 timed out or unknown, 8 no space
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one of ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(message, todo=f"see `{self.prog} --help`")


def build() -> argparse.ArgumentParser:
    """The whole parser; `parse_args` raises InvalidArgument where argparse would exit with 2."""
    parser = _Parser(
        prog="ckptd", description="Durable, verified checkpoints of training runs.",
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for add in (_start, _stop, _drain, _status, _list, _latest, _show, _verify, _migrate, _check_resume):
        add(commands)
    return parser


_Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(
    commands: _Commands[_Parser], name: str, text: str, *, json: bool = True
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--root", metavar="DIR", help="folder of the checkpoints (or CKPTD_ROOT)")
    if json:
        parser.add_argument("--json", action="store_true", help="one JSON object: raw bytes, UTC")
    return parser


def _with_run(parser: argparse.ArgumentParser, text: str = 'run name (or CKPTD_RUN; "default")') -> None:
    parser.add_argument("--run", metavar="RUN", help=text)


def _start(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "start", "run the daemon of a root, in the foreground or detached")
    _with_run(parser, "the run the policy flags are for (or CKPTD_RUN; all)")
    parser.add_argument(
        "--detach", action="store_true", help="return when it is ready; print endpoint, pid and log"
    )
    parser.add_argument("--keep-last", metavar="N", help="keep the N newest verified checkpoints (5)")
    parser.add_argument("--keep-best", metavar="N", help="keep the N best by --monitor (0)")
    parser.add_argument(
        "--monitor", metavar="NAME:min|max", help="metric of --keep-best and of the selector best"
    )
    parser.add_argument(
        "--grace", metavar="TIME", help="how long SIGTERM goes on serving attached clients (30s)"
    )
    parser.add_argument(
        "--idle-exit", metavar="TIME", help="leave after so long without clients (default: stay)"
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="serve clients by TCP on this machine too: tcp://127.0.0.1:PORT, 0 for "
        "any free port; only who can read ROOT/.ckptd/daemon.json gets in",
    )  # fmt: skip
    parser.add_argument(
        "--max-write-rate", metavar="SIZE", help="write checkpoints at no more than so many bytes per second (1MB or "
        "more), also while somebody waits; 0 for no bound (0). Kept in .ckptd/ckptd.toml for later starts",
    )  # fmt: skip
    parser.add_argument(
        "--scrub-every", metavar="TIME", help="read every checkpoint again within that time, slowly, to find what has "
        "rotted (1h or more); 0 for never (7d). Kept in .ckptd/ckptd.toml for later starts",
    )  # fmt: skip
    parser.add_argument(
        "--max-staged-bytes", metavar="SIZE",
        help="memory of all clients' snapshots together; 0 for no other bound than free memory (0)",
    )  # fmt: skip
    parser.add_argument("--max-client-bytes", metavar="SIZE", help="the same of each client (0)")
    parser.add_argument(
        "--timeout", metavar="TIME", help="with --detach: how long to wait until it is ready (30s)"
    )


def _stop(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "stop", "drain the daemon, stop it and wait until it is gone", json=False)
    parser.add_argument("--grace", metavar="TIME", help="how long to go on serving attached clients (0)")
    parser.add_argument("--timeout", metavar="TIME", help="how long to wait until it is gone (grace + 60s)")


def _drain(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "drain", "wait until everything accepted so far is durable", json=False)
    _with_run(parser, "only this run (or CKPTD_RUN; all)")
    parser.add_argument("--verified", action="store_true", help="wait until it is verified too")
    parser.add_argument("--timeout", metavar="TIME", help="how long to wait (5m)")


def _status(commands: _Commands[_Parser]) -> None:
    _command(commands, "status", "show the daemon, its runs and their snapshots")


def _list(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "list", "list the checkpoints of the root with their state")
    _with_run(parser, "only this run (or CKPTD_RUN; all)")


def _latest(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "latest", "print the path of the latest valid checkpoint")
    _with_run(parser)
    parser.add_argument("--no-wait", action="store_true", help="answer at once with what is verified already")


def _selecting(parser: argparse.ArgumentParser) -> None:
    _with_run(parser)
    parser.add_argument(
        "--monitor", metavar="NAME:min|max", help="metric of the selector best (the policy's)"
    )


def _show(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "show", "show what one checkpoint holds")
    parser.add_argument("selector", metavar="SEL", help="latest, best, 1200, 1200.2 or a path")
    _selecting(parser)
    parser.add_argument("--tensors", action="store_true", help="list its tensors too")


def _verify(commands: _Commands[_Parser]) -> None:
    parser = _command(commands, "verify", "re-read checkpoints from the medium and check every hash")
    parser.add_argument("selectors", metavar="SEL", nargs="*", help="latest, best, 1200, 1200.2 or a path")
    _selecting(parser)
    parser.add_argument("--all", action="store_true", help="every checkpoint (of all runs without --run)")


def _migrate(commands: _Commands[_Parser]) -> None:
    parser = commands.add_parser(
        "migrate", help="write a checkpoint of format v1 as v2", allow_abbrev=False,
        description="Write a checkpoint of format v1 as a new one of v2; the old one is left as it is.",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", help="folder or ckpt.pt of format v1")
    parser.add_argument(
        "--out", metavar="DIR", help="where to write the new folder (default: beside the old one)"
    )


def _check_resume(commands: _Commands[_Parser]) -> None:
    parser = commands.add_parser(
        "check-resume", help="run a job, kill it, resume it, and name the first thing that differs",
        allow_abbrev=False, description="Run a job, kill it by SIGKILL, resume it in a new process, compare every "
        "loss and all of its state bit for bit, and name the first thing that differs. Exits with 0 when nothing "
        "does, with 1 when something does or the job fails.",
    )  # fmt: skip
    parser.add_argument(
        "job", metavar="JOB", help="MODULE:FUNCTION or FILE.py:FUNCTION that returns (state, losses); "
        "see help(ckptd.check_resume)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", metavar="N", required=True, help="steps of the uninterrupted run, 2 or more"
    )
    parser.add_argument(
        "--cut", metavar="K", action="append", dest="cuts",
        help='kill it after step K; may be repeated; "all" for each step (default: one in the middle)',
    )  # fmt: skip
    parser.add_argument("--timeout", metavar="TIME", help="how long each process may take (10m)")
    parser.add_argument("--keep", metavar="DIR", help="keep traces, logs and checkpoints in this new folder")
    parser.add_argument("--json", action="store_true", help="one JSON object")
