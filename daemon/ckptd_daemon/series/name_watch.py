"""Which names in runs' folders came, went or were renamed, as the kernel tells: a listing costs more with every name.

The kernel queues an event before the call that caused it returns, whoever made that call: once something was done,
`changed` says so. What it can't be relied on for is said too, and then a listing has to tell: events that were lost, a
folder that isn't the one at its path any more, and file systems on which other machines may change something.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_IN_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
#: IN_ATTRIB (a copy sets a folder's times once all is in it), IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE,
#: IN_DELETE_SELF, IN_MOVE_SELF; IN_ONLYDIR, IN_DONT_FOLLOW
_WANTED: Final = 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800 | 0x01000000 | 0x02000000
_LOST: Final = 0x400 | 0x800 | 0x2000 | 0x8000  # the folder itself went; IN_UNMOUNT; IN_IGNORED
_OVERFLOW: Final = 0x4000
_EVENT: Final = struct.Struct("=iIII")
_READ_BYTES: Final = 65536
#: Names kept for one folder; with more it is to be listed.
_MOST_NAMES: Final = 10_000
#: f_type of file systems that only this machine changes, and only by calls: ext, xfs, btrfs, tmpfs, overlay, f2fs,
#: bcachefs. Not zfs, which goes back to a snapshot under those who use it, and tells nobody.
_LOCAL: Final = {0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0xCA451A4E}

#: What these two say of inotify is not of files.
_LIMITS: Final = {
    errno.EMFILE: ": fs.inotify.max_user_instances, or ulimit -n",
    errno.ENOSPC: ": fs.inotify.max_user_watches",
}

_libc: Final = ctypes.CDLL(None, use_errno=True)


class NameWatch:
    """One queue of events for any number of folders. Used by one thread. A user has few: 128, by default; so it is closed,
    at the latest when it is forgotten."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._close: Callable[[], object] = int  # there is nothing yet
        self._followed = weakref.WeakValueDictionary[int, Followed]()

    def __repr__(self) -> str:
        return f"<NameWatch of {len(self._followed)} folders>"

    def follow(self, folder: Path) -> Followed | None:
        """Have changes to the names in a folder told, from now on. None: the kernel doesn't, and that is said."""
        try:
            return self._follow(folder)
        except OSError as error:
            limit = _LIMITS.get(error.errno or 0, "")
            log.warning("names.not_watched folder=%s %s%s; it is listed instead", folder, error, limit)
            return None

    def _follow(self, folder: Path) -> Followed | None:
        if not _is_local(folder):
            return None
        if self._fd is None:
            self._fd = _checked(_libc.inotify_init1(_IN_NONBLOCK_CLOEXEC))
            self._close = weakref.finalize(self, os.close, self._fd)
        found = os.lstat(folder)
        number = _checked(_libc.inotify_add_watch(self._fd, os.fsencode(folder), _WANTED))
        before = self._followed.get(number)
        if before is not None:  # the kernel tells of a folder once, whoever asked
            before.lose(for_ever=True)
        followed = self._followed[number] = Followed(self, number, folder, (found.st_dev, found.st_ino))
        return followed

    def unfollow(self, number: int, one: Followed) -> None:
        """Not this one any more."""
        if self._followed.get(number) is one and self._fd is not None:
            del self._followed[number]
            _libc.inotify_rm_watch(self._fd, number)

    def take(self) -> None:
        """Tell each followed folder of what happened in it."""
        with contextlib.suppress(BlockingIOError):
            while self._fd is not None and (events := os.read(self._fd, _READ_BYTES)):
                self._tell(events)

    def close(self) -> None:
        """End it; nothing is told any more."""
        self._close()
        self._fd = None
        self._followed.clear()

    def _tell(self, events: bytes) -> None:
        at = 0
        while at < len(events):
            number, what, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            if what & _OVERFLOW:
                for followed in self._followed.values():
                    followed.lose()
            elif (one := self._followed.get(number)) is not None:
                name = os.fsdecode(events[at - length : at].rstrip(b"\0"))
                one.lose(for_ever=True) if what & _LOST else one.add(name)


class Followed:
    """One folder; made by NameWatch.follow.

    Attributes:
        ended: Nothing is told of it any more.
    """

    def __init__(self, watch: NameWatch, number: int, folder: Path, place: tuple[int, int]) -> None:
        self._watch, self._number, self._folder, self._place = watch, number, folder, place
        self._names: set[str] = set()
        self._lost = self.ended = False

    def __repr__(self) -> str:
        return f"<Followed {self._folder} changed={len(self._names)} lost={self._lost} ended={self.ended}>"

    def changed(self) -> set[str] | None:
        """The names that changed since this was asked; None when that can't be told: list the folder then.

        Raises:
            OSError: The queue can't be read.
        """
        self._watch.take()
        names, lost = self._names, self._lost
        self._names, self._lost = set(), False
        self.ended = self.ended or not self._is_in_place()
        return None if lost or self.ended else names

    def add(self, name: str) -> None:
        """This name changed."""
        if len(self._names) < _MOST_NAMES:
            self._names.add(name)
        else:
            self._lost = True

    def lose(self, *, for_ever: bool = False) -> None:
        """Some events didn't come; for_ever: none will any more."""
        self._lost = True
        self.ended = self.ended or for_ever

    def stop(self) -> None:
        """Nobody asks any more."""
        self.ended = True
        self._watch.unfollow(self._number, self)

    def _is_in_place(self) -> bool:
        try:
            found = os.lstat(self._folder)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._place


def _is_local(folder: Path) -> bool:
    answer = (ctypes.c_long * 64)()  # struct statfs begins with f_type, on machines of 64 bits
    _checked(_libc.statfs(os.fsencode(folder), ctypes.byref(answer)))
    return ctypes.sizeof(ctypes.c_long) == 8 and answer[0] in _LOCAL


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
