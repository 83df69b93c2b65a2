"""A path that is plainly no checkpoint: what it is instead, and what to pass.

Only a look at names. A folder that has any file of a checkpoint, or a checkpoint's name, is one to the reader, who
says what is wrong with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ckptd.disk.root_runs import is_run
from ckptd.errors import CkptdError, InvalidArgument, NothingThere
from ckptd.names import (
    DECISIONS_DIR,
    INDEX_FILE,
    META_FILE,
    SERVICE_DIR,
    SINGLE_FILE,
    TABLE_FILE,
    parse_quarantine_folder,
    parse_step_folder,
    parse_work_folder,
)

_BODIES: Final = frozenset({TABLE_FILE, META_FILE, SINGLE_FILE})


def refuse_wrong_path(path: str | os.PathLike[str]) -> None:
    """Return when path may be a checkpoint's folder, a file of format v1, or isn't there.

    Raises:
        InvalidArgument: A file inside a checkpoint's folder, a run's folder, or a root.
        NothingThere: Another folder, with nothing of a checkpoint in it.
    """
    real = Path(os.path.realpath(path))
    try:
        found = _beside(real) if real.is_file() else _instead(real, set(os.listdir(real)))
    except OSError:
        return  # the reader says it, and better
    if found is not None:
        raise found


def _beside(file: Path) -> CkptdError | None:
    """Format v1 may be a single file; every other file is part of what the folder holds."""
    beside = set(os.listdir(file.parent))
    if TABLE_FILE in beside or (INDEX_FILE in beside and file.name != SINGLE_FILE):
        return InvalidArgument(
            "a file of a checkpoint, not the checkpoint",
            where=str(file),
            todo=f"pass its folder: {file.parent}",
        )
    return None


def _instead(folder: Path, inside: set[str]) -> CkptdError | None:
    if _has_a_checkpoints_name(folder.name) or inside & _BODIES or any(".shard-" in name for name in inside):
        return None
    if DECISIONS_DIR in inside or any(parse_step_folder(name) is not None for name in inside):
        return _whole(folder, "a run's folder", folder.parent, folder.name)
    if INDEX_FILE in inside:
        return None
    there = sorted(name for name in inside if is_run(name, folder / name))
    if SERVICE_DIR in inside or there:
        return _whole(folder, "a root", folder, there[0] if there else "RUN")
    return NothingThere(
        "no checkpoint: nothing of one is in this folder", where=str(folder),
        todo="pass a checkpoint's folder, such as ROOT/RUN/step-000001200",
    )  # fmt: skip


def _whole(folder: Path, what: str, root: Path, run: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what}, not a checkpoint", where=str(folder),
        todo=f"pass one of its step-… folders; ckptd.latest_valid({str(root)!r}, {run!r}) finds the latest",
    )  # fmt: skip


def _has_a_checkpoints_name(name: str) -> bool:
    return any(
        parse(name) is not None for parse in (parse_step_folder, parse_quarantine_folder, parse_work_folder)
    )
