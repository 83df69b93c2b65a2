"""`ckptd latest`: the bare path of the latest valid checkpoint on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
from typing import Any

from ckptd.disk.series import Checkpoint, latest_valid
from ckptd.errors import NothingThere
from ckptd.format.strict_json import float_to_json
from ckptd_daemon.cli import arguments, output, units


def run(args: argparse.Namespace) -> int:
    """Print the path; NothingThere when there is none, NoValidCheckpoint when all fail."""
    root, run_name = arguments.root(args), arguments.run(args)
    found = latest_valid(root, run_name, wait=not args.no_wait, on_progress=output.note)
    if found is None:
        raise NothingThere(
            "no verified checkpoint" if args.no_wait else "no checkpoint", where=f"{root}, run {run_name}",
            todo="ask without --no-wait to have one verified now" if args.no_wait else "",
        )  # fmt: skip
    for passed in found.passed_over:
        output.note(f"passed over {passed.name}: {passed.reason}")
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
