"""Keeping the run's index up: index.json now and then, and what came since in recent.json, at every change.

What must be true: recent.json never outlives what it says. Where it can't be written it is removed, and so it is
before a checkpoint is committed under a name that the run knew: a listing tells the two folders apart by a time alone.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Final

from ckptd.disk.run_index import (
    fold_recent,
    forget_recent,
    identity_of,
    known_folders,
    write_recent,
    write_run_index,
)
from ckptd_daemon.series.run_view import RunView

#: Rows and names in recent.json before index.json is written anew: each costs something at every change, and what
#: index.json costs, with each checkpoint, is shared among so many changes. Twice the root of their number at least.
_MOST_RECENT: Final = 32


class IndexFile:
    """The index of one run, as this process has written it. Used by one thread, under the root's lock."""

    def __init__(self, run_dir: Path, view: RunView) -> None:
        self._run_dir, self._base = run_dir, ""
        known = known_folders(run_dir)
        if known is not None and known[1] != view.folders():
            fold_recent(run_dir)

    def __repr__(self) -> str:
        return f"<IndexFile {self._run_dir}>"

    def write(self, view: RunView) -> None:
        """Have it say what is known now.

        Raises:
            OSError: It says less; nothing depends on it.
        """
        if not self._base or identity_of(self._run_dir) != self._base or _is_old(view):
            self._base = ""
            write_run_index(self._run_dir, view.run_index())
            self._base = identity_of(self._run_dir)
            view.touched = set()
        write_recent(self._run_dir, view.recent(self._base))

    def forget(self) -> None:
        """Names may come to mean other checkpoints."""
        forget_recent(self._run_dir)


def _is_old(view: RunView) -> bool:
    return view.touched is None or len(view.touched) > max(_MOST_RECENT, 2 * isqrt(len(view.names)))
