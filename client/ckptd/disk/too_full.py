"""The error for a daemon that can't start because the disk is full: it writes little, but that it must."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ckptd.errors import NoSpace
from ckptd.snapshot.sizes import show_bytes


def no_space(root: Path, error: OSError | None = None) -> NoSpace:
    """Of the daemon of `root`.

    Args:
        root: Its path.
        error: What it met; None when that is only known by its exit code.
    """
    where = root if error is None or error.filename is None else Path(os.fsdecode(error.filename))
    seen = (error.strerror if error is not None else "") or "no room for its record, daemon.json"
    with contextlib.suppress(OSError):
        found = os.statvfs(root)
        seen += f" ({show_bytes(found.f_bavail * found.f_frsize)} and {found.f_favail} files free on its file system)"
    return NoSpace(
        "the daemon can't start: the disk, or the quota, is full", where=str(where), seen=seen,
        todo="free some space, a few KiB do (what is in the root stays readable: ckptd list, latest, verify)",
    )  # fmt: skip
