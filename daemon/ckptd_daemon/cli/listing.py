"""`ckptd list`: every checkpoint of a run, or of all runs, with its state. Read from disk, daemon or not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ckptd.disk.in_quarantine import read_quarantine
from ckptd.disk.rootdir import Root
from ckptd.disk.series import Entry, Series, read_series, runs
from ckptd_daemon.cli import arguments, checkpoint_json, output, selectors, units
from ckptd_daemon.cli.output import Cell

_COLOURS = {
    "verified": "green", "committed": "", "changed": "yellow", "incomplete": "yellow", "unreadable": "yellow",
    "corrupt": "red", "quarantined": "red",
}  # fmt: skip
_HEADERS = ("RUN", "NAME", "STEP", "SEQ", "STATE", "BYTES", "SAVED (UTC)", "METRICS", "NOTE")


def run(args: argparse.Namespace) -> int:
    """Print the list; NothingThere when it is empty."""
    root = arguments.root_to_read(args)
    chosen = arguments.run_or_all(args)
    listed = [_Listed(root, name) for name in ([chosen] if chosen else runs(root))]
    if args.json:
        output.emit_json("ckpt.v2-list", {"root": str(root.path), "runs": [_as_json(run) for run in listed]})
    else:
        output.emit(output.table(_HEADERS, [_row(run, *each) for run in listed for each in run.entries()]))
    if not any(True for run in listed for _ in run.entries()):
        raise selectors.nothing_in(root, chosen, "no checkpoints")
    return 0


class _Listed:
    """One run: what is in its folder, and what lies in its quarantine."""

    def __init__(self, root: Root, run: str) -> None:
        self.series: Series = read_series(root, run)
        self._held = read_quarantine(self.series.run_dir)

    def entries(self) -> Iterator[tuple[Entry, int | None, bool]]:
        """(entry, its sequence, whether it lies in quarantine); the quarantine last."""
        yield from ((entry, entry.sequence, False) for entry in self.series.entries)
        yield from ((entry, sequence, True) for sequence, entry in self._held)


def _row(run: _Listed, entry: Entry, sequence: int | None, quarantined: bool) -> list[Cell]:
    index = entry.index
    state = "quarantined" if quarantined else state_of(entry)
    size = None if index is None else index.total_bytes
    return [
        Cell(run.series.run),
        Cell(entry.name),
        Cell(str(entry.step)),
        Cell("" if sequence is None else str(sequence)),
        Cell(state, colour=_COLOURS[state]),
        Cell("") if size is None else Cell(str(size), units.show_bytes(size)),
        Cell("" if index is None else units.show_utc(index.saved_at)),
        Cell("" if index is None else _metrics(index.metrics)),
        Cell(note_of(run.series.run, entry)),
    ]


def state_of(entry: Entry) -> str:
    """verified, committed (not verified yet), changed (since it was verified), incomplete or corrupt."""
    if entry.status != "committed":
        return entry.status
    return "verified" if entry.verified else "changed" if entry.changed else "committed"


def note_of(run: str, entry: Entry) -> str:
    """What else is to be said: abandoned, foreign, or why it is changed, incomplete or corrupt."""
    notes = [] if entry.own or entry.index is None else ["foreign"]
    notes += [] if entry.on_line or entry.status != "committed" else ["abandoned"]
    if entry.changed:
        notes.append(f"not the files that were verified: ckptd verify --run {run} {entry.name}")
    return ", ".join(notes + ([entry.reason] if entry.reason else []))


def _metrics(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in sorted(metrics.items()))


def _as_json(run: _Listed) -> dict[str, Any]:
    return {
        "run": run.series.run,
        "run_id": run.series.run_id,
        "checkpoints": [
            {
                "name": entry.name,
                "path": str(entry.path),
                "step": entry.step,
                "state": "quarantined" if quarantined else state_of(entry),
                "sequence": sequence,
                "reason": entry.reason or "",
                "own": entry.own,
                "on_line": entry.on_line,
                **({} if entry.index is None else checkpoint_json.summary(entry.index)),
            }
            for entry, sequence, quarantined in run.entries()
        ],
    }
