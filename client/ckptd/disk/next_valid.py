"""What to take in place of a checkpoint that proved corrupt: told from what is verified already, nothing is read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import Entry, candidates, read_series
from ckptd.errors import CkptdError, CorruptCheckpoint
from ckptd.names import DECISIONS_DIR, parse_step_folder


def instead_of(path: str | os.PathLike[str]) -> str:
    """In words, which checkpoint of the same run to take, or how to find one; "" where path is in no run."""
    folder = Path(path).absolute()
    run_dir = folder.parent
    if parse_step_folder(folder.name) is None or not (run_dir / DECISIONS_DIR).is_dir():
        return ""
    with contextlib.suppress(OSError, CkptdError):  # an error about another error would hide it
        series = read_series(Root.for_reading(run_dir.parent), run_dir.name)
        before = _before(candidates(series), folder.name)
        if before is not None:
            return f"step {before.step} ({before.name}) is the newest valid one before it"
    return f"ckptd latest --root {run_dir.parent} --run {run_dir.name} finds the newest valid one"


def with_advice(error: CorruptCheckpoint, path: str | os.PathLike[str]) -> CorruptCheckpoint:
    """The same error, which also says what to take instead."""
    if not error.todo:
        error.todo = instead_of(path)
    return error


def _before(newest_first: list[Entry], name: str) -> Entry | None:
    """The newest verified one that comes after this name in the list, or in all of it when it isn't listed."""
    names = [entry.name for entry in newest_first]
    later = newest_first[names.index(name) + 1 :] if name in names else newest_first
    return next((entry for entry in later if entry.verified), None)
