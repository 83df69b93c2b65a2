"""`ckptd list`: every checkpoint of a run, or of all runs, with its state. Read from disk, daemon or not."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ckptd.disk.rootdir import Root
from ckptd.disk.series import Entry, Series, read_series, runs
from ckptd.errors import NothingThere
from ckptd_daemon.cli import arguments, checkpoint_json, output, units
from ckptd_daemon.cli.output import Cell

_COLOURS = {"verified": "green", "committed": "", "incomplete": "yellow", "corrupt": "red"}
_HEADERS = ("RUN", "NAME", "STEP", "SEQ", "STATE", "BYTES", "SAVED (UTC)", "METRICS", "NOTE")


def run(args: argparse.Namespace) -> int:
    """Print the list; NothingThere when it is empty."""
    root = Root.for_reading(arguments.root(args))
    chosen = arguments.run_or_all(args)
    listed = [read_series(root, name) for name in ([chosen] if chosen else runs(root))]
    if args.json:
        output.emit_json(
            "ckpt.v2-list", {"root": str(root.path), "runs": [_as_json(series) for series in listed]}
        )
    else:
        output.emit(
            output.table(_HEADERS, [_row(series, entry) for series in listed for entry in series.entries])
        )
    if not any(series.entries for series in listed):
        raise NothingThere("no checkpoints", where=f"{root.path}" + (f", run {chosen}" if chosen else ""))
    return 0


def _row(series: Series, entry: Entry) -> list[Cell]:
    index = entry.index
    state = state_of(entry)
    size = None if index is None else index.total_bytes
    return [
        Cell(series.run),
        Cell(entry.name),
        Cell(str(entry.step)),
        Cell("" if index is None else str(index.sequence)),
        Cell(state, colour=_COLOURS[state]),
        Cell("") if size is None else Cell(str(size), units.show_bytes(size)),
        Cell("" if index is None else units.show_utc(index.saved_at)),
        Cell("" if index is None else _metrics(index.metrics)),
        Cell(note_of(entry)),
    ]


def state_of(entry: Entry) -> str:
    """verified, committed, incomplete or corrupt."""
    return "verified" if entry.status == "committed" and entry.verified else entry.status


def note_of(entry: Entry) -> str:
    """What else is to be said: abandoned, foreign, or why it is incomplete or corrupt."""
    notes = [] if entry.own or entry.index is None else ["foreign"]
    notes += [] if entry.on_line or entry.status != "committed" else ["abandoned"]
    return ", ".join(notes + ([entry.reason] if entry.reason else []))


def _metrics(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in sorted(metrics.items()))


def _as_json(series: Series) -> dict[str, Any]:
    return {
        "run": series.run,
        "run_id": series.run_id,
        "checkpoints": [
            {
                "name": entry.name,
                "path": str(entry.path),
                "step": entry.step,
                "state": state_of(entry),
                "reason": entry.reason or "",
                "own": entry.own,
                "on_line": entry.on_line,
                **({} if entry.index is None else checkpoint_json.summary(entry.index)),
            }
            for entry in series.entries
        ],
    }
