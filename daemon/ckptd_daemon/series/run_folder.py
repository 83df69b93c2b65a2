"""Whether a run's folder still is the one that was opened. Moving or removing it by hand takes along what is in it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


class RunFolder:
    """The folder at `path` now. Raises OSError when it can't be looked at."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode = path, _inode(path)

    def is_lost(self) -> bool:
        """Whether it isn't there any more, or another one is; that is said. Raises OSError: it can't be told."""
        try:
            if _inode(self._path) == self._inode:
                return False
        except FileNotFoundError:
            pass
        log.error(
            "run.folder_lost run=%s it was moved, removed or replaced while it was served; what was in it isn't in the "
            "run any more (move its step-… folders back to have them again), and saves go on in %s",
            self._path.name, self._path,
        )  # fmt: skip
        return True


def _inode(folder: Path) -> tuple[int, int]:
    found = os.lstat(folder)
    return found.st_dev, found.st_ino
