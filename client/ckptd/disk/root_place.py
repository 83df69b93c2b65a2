"""Whether a root still is where its path says. Told by an open descriptor: the inode of a folder that was deleted is
given to another one, but not while somebody has it open.

Whoever writes to a root asks before and after: at its path there may be nothing by now, or another root.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from ckptd.errors import RootMoved

__all__ = ["RootPlace"]

_DELETED: Final = " (deleted)"  # what the kernel appends to the name


class RootPlace:
    """The folder that `path` leads to now, and whether it does later.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __repr__(self) -> str:
        return f"<RootPlace {self.path}>"

    def check(self) -> None:
        """Nothing, when the folder is where it was.

        Raises:
            RootMoved: It isn't.
            OSError: It can't be told now.
        """
        held = os.fstat(self._fd)
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._moved("nothing is at its path") from None
        if (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise self._moved("another folder is at its path")

    @property
    def removed(self) -> bool:
        """Whether the folder is no more, anywhere."""
        return os.fstat(self._fd).st_nlink == 0 or self._now().endswith(_DELETED)

    def close(self) -> None:
        """Let go of it; without effect the second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # it is closed, whatever it says
                os.close(fd)

    def _moved(self, at_its_path: str) -> RootMoved:
        where = str(self.path)
        if self.removed:
            return RootMoved(
                "the root was removed while it was in use", where=where, seen=at_its_path,
                todo="its checkpoints are gone. To save there again start the job anew; one that still runs goes on by "
                f"itself once there is an empty folder (mkdir {where})",
            )  # fmt: skip
        now = self._now() or "somewhere else"
        return RootMoved(
            "the root was moved while it was in use", where=where, seen=f"it is {now} now; {at_its_path}",
            todo="nothing is written until it is back at its path. Move it back; or end the job and start a daemon where "
            f"it is (ckptd start --root {now}), which writes what still lies in shared memory",
        )  # fmt: skip

    def _now(self) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{self._fd}")
        except OSError:
            return ""
