"""Deleting checkpoints of a run: renamed first, durably, unlinked then, so that none is ever half there.

What must be true: nothing is unlinked under a name that a reader may offer, and a name that is gone stays
gone after a power cut. What can't be deleted now (busy, immutable, a network file system) is warned of once
and tried again each time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ckptd.disk import durable
from ckptd.names import work_folder

log = logging.getLogger(__name__)


class Trash:
    """The trash of one run. Used under the root's lock."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._full: list[Path] = []
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"<Trash {self._run_dir} {len(self._full)} left>"

    def throw(self, doomed: Sequence[tuple[str, int]]) -> list[str]:
        """Take (name, sequence) of checkpoints out of the run and delete them.

        Returns:
            The names that are gone from the run, also those that were gone already.
        """
        gone = [name for name, sequence in doomed if self._rename(name, sequence)]
        self.empty()
        return gone

    def empty(self) -> None:
        """Delete what was thrown away, also what couldn't be deleted before."""
        if not self._full:
            return
        try:
            durable.fsync_dir(self._run_dir)
        except (
            OSError
        ) as error:  # a power cut may bring the old names back: their bytes must still be there then
            self._warn(self._run_dir.name, error)
            return
        self._full = [path for path in self._full if not self._delete(path)]

    def _delete(self, path: Path) -> bool:
        try:
            durable.remove_tree(path)
        except OSError as error:
            self._warn(path.name, error)
            return False
        return True

    def _rename(self, name: str, sequence: int) -> bool:
        path = self._run_dir / work_folder("trash", sequence)
        try:
            durable.rename_new(self._run_dir / name, path, sync=False)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._warn(name, error)
            return False
        self._full.append(path)
        return True

    def _warn(self, name: str, error: OSError) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "retention.delete_failed run=%s name=%s %s; tried again later",
                self._run_dir.name,
                name,
                error,
            )
