"""Which runs a root has, and what to say to somebody who asked for another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ckptd.disk.entry import MACHINE_ERRORS, reading
from ckptd.disk.rootdir import Root
from ckptd.errors import InvalidArgument
from ckptd.names import DECISIONS_DIR, INDEX_FILE, check_run_name, parse_step_folder

__all__ = ["AnyRoot", "opened", "other_runs", "runs"]

AnyRoot = Root | str | os.PathLike[str]

_MOST_NAMED: Final = 10


def opened(root: AnyRoot) -> Root | None:
    """The root for reading; None when there is no such folder.

    Raises:
        BadRoot: It is a file.
    """
    if isinstance(root, Root):
        return root
    if not os.path.lexists(root):
        return None
    return Root.for_reading(root)


def runs(root: AnyRoot) -> list[str]:
    """Names of the root's runs, sorted: folders that hold a checkpoint, a decision or a run index.

    Raises:
        ReadFailed: They can't be listed, or there are no descriptors or no memory left to look at one.
    """
    there = opened(root)
    if there is None:
        return []
    found = []
    with reading(there.path), os.scandir(there.path) as names:
        for entry in names:
            if entry.is_dir(follow_symlinks=False) and is_run(entry.name, Path(entry.path)):
                found.append(entry.name)
    return sorted(found)


def other_runs(root: AnyRoot, run: str) -> str:
    """In words, which other runs are there and how one is chosen; "" when there are none."""
    others = [name for name in runs(root) if name != run]
    if not others:
        return ""
    named = ", ".join(others[:_MOST_NAMED]) + (", …" if len(others) > _MOST_NAMED else "")
    return f"runs there: {named}; choose one with --run"


def is_run(name: str, path: Path) -> bool:
    """Whether folder `path` of this name is a run's."""
    try:
        check_run_name(name)
        with os.scandir(path) as inside:
            return any(
                each.name in (DECISIONS_DIR, INDEX_FILE) or parse_step_folder(each.name) is not None
                for each in inside
            )
    except InvalidArgument:
        return False
    except OSError as error:
        if error.errno in MACHINE_ERRORS:
            raise  # it would be missing from the list
        return False
