"""Whether a lock is held by nobody but strangers: users who may not write here, and only want others not to.

Who can read a folder can lock it. The root's lock would be anybody's then, on a machine of many users.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["held_by_strangers"]


def held_by_strangers(fd: int) -> bool:
    """Whether all who hold a lock on this open folder are processes of other users, neither its owner nor root.

    Only what is certain counts: a holder who can't be seen from here is none.
    """
    found = os.fstat(fd)
    entitled = {0, os.geteuid(), found.st_uid}
    users = [_user(pid) for pid in _holders(found.st_ino)]
    return bool(users) and all(user is not None and user not in entitled for user in users)


def _holders(inode: int) -> Iterator[int]:
    """Pids, of whichever file system: one too many makes nobody a stranger. 0: of another pid namespace."""
    try:
        lines = Path("/proc/locks").read_text("ascii", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()  # 1: FLOCK  ADVISORY  WRITE 1234 08:01:131090 0 EOF; waiting ones have "->"
        if len(words) == 8 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            yield int(words[4])


def _user(pid: int) -> int | None:
    """The user whose rights a process has; None when that can't be seen."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
        return next(int(line.split()[2]) for line in lines if line.startswith("Uid:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
