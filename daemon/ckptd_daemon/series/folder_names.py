"""Whether the checkpoint folders in a run's folder are those that are known: told by the kernel, or by a listing."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ckptd.disk.entry import Entry, folder_identity
from ckptd.disk.series_entries import list_steps
from ckptd.names import parse_step_folder
from ckptd_daemon.series.name_watch import Followed, NameWatch


class FolderNames:
    """Of one run.

    Args:
        run_dir: Its folder.
        watch: Tells which names changed. None: the folder is listed each time.

    Attributes:
        listed: How many names were gone through the last time; 0 when the kernel had told.
    """

    def __init__(self, run_dir: Path, watch: NameWatch | None) -> None:
        self._run_dir, self._watch = run_dir, watch
        self._followed: Followed | None = watch.follow(run_dir) if watch is not None else None
        self._to_look_at: set[str] = set()
        self._lost = False
        self.listed = 0

    def __repr__(self) -> str:
        return f"<FolderNames {self._followed} to_look_at={len(self._to_look_at)} lost={self._lost}>"

    @property
    def told(self) -> bool:
        """Whether the kernel tells, of every folder that comes in the place of another one too."""
        return self._followed is not None

    def are_known(self, entries: Mapping[str, Entry]) -> bool:
        """Whether there are these. False also when something may have happened that nobody told: read the run then.

        Raises:
            OSError: The folder can't be listed.
        """
        changed = self._followed.changed() if self._followed is not None else None
        self._lost = self._lost or (changed is None and self._followed is not None)
        if self._watch is not None and self._followed is not None and self._followed.ended:
            self._followed.stop()
            self._followed = self._watch.follow(self._run_dir)  # it came back, or another is in its place
        if self._followed is None:
            self.listed = max(len(entries), 1)
            return not self._lost and list_steps(self._run_dir, entries.keys()) == entries.keys()
        self.listed = 0
        self._to_look_at |= changed or set()
        while self._to_look_at and not self._lost:
            name = self._to_look_at.pop()
            if not self._is_as_known(name, entries.get(name)):
                self._to_look_at.add(name)
                return False
        return not self._lost

    def read(self, count: int) -> None:
        """All that is there was read, so many, after the last question."""
        self.listed = max(count, 1)
        self._to_look_at.clear()
        self._lost = False

    def stop(self) -> None:
        """The kernel isn't asked any more."""
        if self._followed is not None:
            self._followed.stop()
        self._followed = self._watch = None

    def _is_as_known(self, name: str, entry: Entry | None) -> bool:
        """Whether what has this name now, if it means anything, is the one that is known. The inode alone doesn't tell:
        of a folder that was removed it is given to the next one that is made."""
        if parse_step_folder(name) is None:
            return True
        try:
            found = os.lstat(self._run_dir / name)
        except OSError as error:
            return entry is None and isinstance(error, FileNotFoundError)
        if entry is None:
            return not stat.S_ISDIR(found.st_mode)
        return stat.S_ISDIR(found.st_mode) and folder_identity(found) == entry.identity
