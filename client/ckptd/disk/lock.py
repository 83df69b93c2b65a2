"""The root's lock: one writer per root, held by flock for as long as the writer lives.

The kernel frees it when the process dies, so there is no stale lock and no age to judge. The file is never
unlinked: two processes could then hold "the lock" on two inodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from types import TracebackType
from typing import Final

from ckptd.disk.daemon_record import DaemonRecord, own_start, process_started
from ckptd.disk.rootdir import Root
from ckptd.errors import BadRoot, RootLocked

_FILE: Final = "lock"
_TRIES: Final = 100

_held: weakref.WeakSet[RootLock] = weakref.WeakSet()


class RootLock:
    """The exclusive right to change a root. Not reentrant, not for use from two threads at once."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._fd: int | None = None

    def __repr__(self) -> str:
        return f"<RootLock {self.root.path} {'held' if self.held else 'free'}>"

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def acquire(self) -> None:
        """Take the lock, or say at once who holds it.

        Raises:
            RootLocked: Another process (or another RootLock of this one) holds it.
            BadRoot: The lock file can't be made, or the file system has no locks.
        """
        if self._fd is not None:
            raise RootLocked("this process holds the root's lock already", where=str(self.root.path))
        path = self.root.service_dir / _FILE
        for _ in range(_TRIES):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise BadRoot("can't open the root's lock", where=str(path), seen=str(error)) from error
            if self._lock_and_check(fd, str(path)):
                self._fd = fd
                _held.add(self)
                self._sign(fd)
                return
            os.close(fd)  # somebody removed the file between open and flock: this is no longer the lock
        raise RootLocked("the root's lock file is being replaced all the time", where=str(path))

    def release(self) -> None:
        """Give the lock up; without effect when it isn't held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            _held.discard(self)

    def __enter__(self) -> RootLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _lock_and_check(self, fd: int, path: str) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held, named = os.fstat(fd), os.lstat(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            holder = _signature(fd)
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._locked(holder) from error
            raise BadRoot("can't lock the root", where=path, seen=str(error)) from error
        return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)

    def _sign(self, fd: int) -> None:
        """Leave pid and start time in the file, for the message another process gives. Decides nothing."""
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, "{} {}\n".format(*own_start()).encode(), 0)

    def _locked(self, holder: tuple[int, int] | None) -> RootLocked:
        """The error that says who holds the lock, and what can be done about that one."""
        what, todo = "another process writes to this root", "wait for it, end it, or pick another root"
        record = DaemonRecord.read(self.root)
        if record is not None and record.alive():
            seen = f"the daemon with pid {record.pid} at {record.endpoint}"
            todo = 'use it (daemon="attach"), stop it (ckptd stop), or pick another root'
        elif holder == own_start():
            what, seen = "this process already saves to this root without a daemon", f"pid {holder[0]}"
            todo = "close() that client first"
        elif holder is not None and process_started(holder[0]) == holder[1]:
            what = "another process saves to this root without a daemon"
            seen = f"pid {holder[0]}, if it isn't a daemon that is just starting or leaving"
        else:
            seen = "a process of another machine or container, or one that is just starting or leaving"
        return RootLocked(what, where=str(self.root.path), seen=seen, todo=todo)


def _signature(fd: int) -> tuple[int, int] | None:
    try:
        pid, started = os.pread(fd, 64, 0).split()
        return int(pid), int(started)
    except (OSError, ValueError):
        return None


def _close_in_child() -> None:
    """Let a forked child (a DataLoader worker) neither hold the lock beyond its parent's life nor free it."""
    for lock in list(_held):
        if lock._fd is not None:
            os.close(lock._fd)  # closing a copy frees nothing; LOCK_UN would
            lock._fd = None
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
