"""Entry point of `ckptd`: parse, dispatch, and turn every error into one line and its exit code."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from ckptd import __version__
from ckptd.errors import CkptdError, InvalidArgument, NoSpace
from ckptd_daemon.cli import output, parser

_INTERRUPTED = 130  # what shells report for SIGINT


def entry() -> None:
    """The console script: run the command of sys.argv and exit with its code."""
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        code = code or 1
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; errors are one line on stderr, never a traceback."""
    try:
        return _run(argv)
    except CkptdError as error:
        output.note(str(error))
        return error.exit_code
    except BrokenPipeError:
        _drop_stdout()
        return 1
    except OSError as error:
        output.note(_of_os(error))
        return NoSpace.exit_code if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    built = parser.build()
    args = built.parse_args(argv)
    if args.version:
        output.emit(f"ckptd {__version__}\n")
        return 0
    if args.command is None:
        raise InvalidArgument("no command", wanted=", ".join(parser.MODULES), todo="see `ckptd --help`")
    module = importlib.import_module(f"ckptd_daemon.cli.{parser.MODULES[args.command]}")
    code: int = module.run(args)
    return code


def _of_os(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _drop_stdout() -> None:
    # The reader has gone (`ckptd list | head`); without this the interpreter complains about it at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    entry()
