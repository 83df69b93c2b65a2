"""What a look at the root's folders tells the verifier: which runs there are, and what was verified in earlier lives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckptd.errors import InvalidArgument
from ckptd.names import INDEX_FILE, check_run_name
from ckptd_daemon.verify.rota import age_s


def runs_of(root: Path) -> Iterator[str]:
    """The names of its runs; none while it can't be read, the next listing shows."""
    with contextlib.suppress(OSError):
        for name in folders_of(root):
            with contextlib.suppress(InvalidArgument):
                yield check_run_name(name)


def folders_of(path: Path) -> list[str]:
    """The names of the folders in this one, no links. Raises OSError."""
    with os.scandir(path) as found:
        return [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]


def ages_of_verified(root: Path, run: str, now: float) -> dict[str, float | None]:
    """Who has a mark that fits what is there: name → seconds since it was read; None when that can't be told.

    Args:
        now: By the wall clock.

    Raises:
        OSError, CkptdError: The run can't be read.
    """
    if not (root / run / INDEX_FILE).exists():  # all marks are in it, or go with it
        return {}
    # What it takes to read a series is more than the rest of a verifier: a run that has just begun needs none of it.
    from ckptd.disk.rootdir import Root
    from ckptd.disk.run_index import read_run_index
    from ckptd.disk.series import read_series

    verified = [entry.name for entry in read_series(Root.for_reading(root), run).entries if entry.verified]
    cached = read_run_index(root / run)
    read_at = {mark.name: mark.verified_at for mark in cached.marks} if cached is not None else {}
    return {name: age_s(read_at.get(name, 0.0), now) for name in verified}
