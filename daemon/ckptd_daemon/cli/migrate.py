"""`ckptd migrate`: write a checkpoint of format v1 as a new one of format v2. Alone in loading torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptd_daemon.cli import output


def run(args: argparse.Namespace) -> int:
    """Print the path of the new checkpoint."""
    from ckptd.tensors.migrate import migrate_v1_to_v2

    out = None if args.out is None else Path(args.out)
    output.emit(f"{migrate_v1_to_v2(Path(args.path), out)}\n")
    return 0
