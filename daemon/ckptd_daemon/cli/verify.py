"""`ckptd verify`: re-read checkpoints from the medium, say every fault. Changes nothing on disk."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptd.disk.entry import MACHINE_ERRORS
from ckptd.disk.next_valid import instead_of
from ckptd.disk.series import read_series, runs
from ckptd.disk.verification import Report, check
from ckptd.errors import CkptdError, CorruptCheckpoint, InvalidArgument, NothingThere, ReadFailed
from ckptd_daemon.cli import arguments, output, selectors, units
from ckptd_daemon.cli.output import Cell
from ckptd_daemon.cli.progress import Progress

_COLOURS = {"valid": "green", "corrupt": "red", "gone": "yellow", "unreadable": "yellow"}
_HEADERS = ("CHECKPOINT", "STATE", "BYTES", "READ", "FAULTS")


def run(args: argparse.Namespace) -> int:
    """Print a line per checkpoint; exit code 4 when one is corrupt, else 1 when one can't be read, else 3."""
    if args.all and args.selectors:
        raise InvalidArgument(
            "--all goes without SEL", seen=" ".join(args.selectors), todo="give one of them"
        )
    if not args.all and not args.selectors:
        raise InvalidArgument(
            "no checkpoint named", todo="give latest, best, a step such as 1200, a path, or --all"
        )
    reports = [_check(path) for path in _paths(args)]
    if args.json:
        output.emit_json("ckpt.v2-verify", {"checkpoints": [_as_json(report) for report in reports]})
    else:
        output.emit(output.table(_HEADERS, [_row(report) for report in reports]))
    bad = [report for report in reports if not report.ok]
    for report in bad:
        _say(report)
    states = {state_of(report) for report in bad}
    if not states:
        return 0
    worst: type[CkptdError] = CorruptCheckpoint if "corrupt" in states else ReadFailed
    return NothingThere.exit_code if states == {"gone"} else worst.exit_code


def _say(report: Report) -> None:
    """For the person at stderr: the faults, when the table goes elsewhere, and what to take instead."""
    if not output.table_is_shown():
        for fault in report.faults or ("gone",):
            output.note(f"{report.path}: {fault}")
    if state_of(report) == "corrupt" and (advice := instead_of(report.path)):
        output.note(f"{report.name}: {advice}")


def _paths(args: argparse.Namespace) -> Iterator[Path]:
    if not args.all:
        yield from [selectors.path_of(args, selector) for selector in args.selectors]
        return
    root = arguments.root_to_read(args)
    chosen = arguments.run_or_all(args)
    found = False
    for name in [chosen] if chosen else runs(root):
        for entry in read_series(root, name).entries:
            found = True
            yield entry.path
    if not found:
        raise selectors.nothing_in(root, chosen, "no checkpoints")


def _check(path: Path) -> Report:
    progress = Progress(f"verifying {path.name}")
    try:
        return check(path, uncached=True, progress=progress.advance)
    except ReadFailed as error:
        if error.errno in MACHINE_ERRORS:
            raise  # nor could the others be read
        return _Unread(
            path=path, name=path.name, sequence=None, index_sha256="", ok=False, gone=False,
            faults=(str(error),), bytes=0, how="", stat_signature="",
        )  # fmt: skip
    finally:
        progress.end()


class _Unread(Report):
    """It can't be told now."""


def state_of(report: Report) -> str:
    """valid, gone, unreadable or corrupt."""
    if report.ok:
        return "valid"
    return "gone" if report.gone else "unreadable" if isinstance(report, _Unread) else "corrupt"


def _row(report: Report) -> list[Cell]:
    state = state_of(report)
    return [
        Cell(str(report.path)),
        Cell(state, colour=_COLOURS[state]),
        Cell(str(report.bytes), units.show_bytes(report.bytes)),
        Cell(report.how),
        Cell("; ".join(report.faults)),
    ]


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "name": report.name,
        "sequence": report.sequence,
        "state": state_of(report),
        "faults": list(report.faults),
        "bytes": report.bytes,
        "read": report.how,
        "index_sha256": report.index_sha256,
    }
