"""`ckptd latest`: the bare path of the latest valid checkpoint on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
from typing import Any

from ckptd.disk.series import Checkpoint
from ckptd.format.strict_json import float_to_json
from ckptd_daemon.cli import output, selectors, units


def run(args: argparse.Namespace) -> int:
    """Print the path; NothingThere when there is none, NoValidCheckpoint when all fail."""
    found = selectors.latest(args, wait=not args.no_wait)
    if args.json:
        output.emit_json("ckpt.v2-latest", _as_json(found))
    else:
        output.emit(f"{found.path}\n")
    return 0


def _as_json(found: Checkpoint) -> dict[str, Any]:
    return {
        "run": found.run,
        "name": found.name,
        "path": str(found.path),
        "step": found.step,
        "sequence": found.sequence,
        "saved_at": units.show_utc(found.saved_at),
        "metrics": {name: float_to_json(value) for name, value in sorted(found.metrics.items())},
        "passed_over": [{"name": passed.name, "reason": passed.reason} for passed in found.passed_over],
    }
