"""The root's lock: one writer per root, held by flock for as long as the writer lives.

The kernel frees it when the process dies, so there is no stale lock and no age to judge. It is taken on two
inodes: on the root folder itself, which can't be removed without being another root, and on .ckptd/lock, which
says who holds it. The file is never unlinked by us; whoever removes it lets nobody in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import weakref
from types import TracebackType
from typing import Final

from ckptd.disk.daemon_record import DaemonRecord, own_start, process_started
from ckptd.disk.folder_files import close_all
from ckptd.disk.lock_strangers import held_by_strangers
from ckptd.disk.root_place import RootPlace
from ckptd.disk.rootdir import Root
from ckptd.errors import BadRoot, RootLocked

log = logging.getLogger(__name__)

_FILE: Final = "lock"
_TRIES: Final = 100
_TAKEN: Final = (errno.EWOULDBLOCK, errno.EACCES)
_NO_FOLDER_LOCKS: Final = (errno.EBADF, errno.EISDIR, errno.EINVAL, errno.EOPNOTSUPP)  # NFS, for one

_held: weakref.WeakSet[RootLock] = weakref.WeakSet()


class RootLock:
    """The exclusive right to change a root. Not reentrant, not for use from two threads at once."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._fd: int | None = None
        self._folder_fd: int | None = None
        self._place: RootPlace | None = None

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
        if self.held:
            raise RootLocked("this process holds the root's lock already", where=str(self.root.path))
        self._folder_fd = self._lock_folder()  # first: who doesn't get it changes nothing below
        try:
            self._place = self._find_place()
            self._fd = self._lock_file()
        except BaseException:
            self._close()
            raise
        _held.add(self)

    def release(self) -> None:
        """Give the lock up; without effect when it isn't held."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)  # this process may live on: its name in the file would be a lie
            self._close()
            _held.discard(self)

    @property
    def place(self) -> RootPlace:
        """Tells whether the folder that was locked still is what the root's path leads to.

        Raises:
            RootLocked: The lock isn't held.
        """
        if self._place is None:
            raise RootLocked("the root's lock isn't held", where=str(self.root.path))
        return self._place

    def restore(self) -> bool:
        """Make and lock the file again if it was removed or replaced; whether that was needed.

        Raises:
            RootLocked, BadRoot: It can't be; the root's folder stays locked.
        """
        if self._fd is None or _is_at(self._fd, self._path):
            return False
        old, self._fd = self._fd, self._lock_file()
        os.close(old)
        return True

    @property
    def _path(self) -> str:
        return str(self.root.service_dir / _FILE)

    def _lock_folder(self) -> int | None:
        """A descriptor that holds the lock on the root's folder; None where folders can't be locked, or other users do."""
        where = str(self.root.path)
        try:
            fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable("the root can't be opened", where, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            strangers = error.errno in _TAKEN and held_by_strangers(fd)
            os.close(fd)
            if error.errno in _TAKEN and not strangers:
                raise self._locked(holder(self.root)) from error
            if error.errno not in _NO_FOLDER_LOCKS and not strangers:
                raise _unusable("can't lock the root", where, error) from error
            log.warning("lock.file_only root=%s reason=%s", where, error)
            return None
        return fd

    def _find_place(self) -> RootPlace:
        try:
            return RootPlace(self.root.path)
        except OSError as error:
            raise _unusable("the root can't be opened", str(self.root.path), error) from error

    def _lock_file(self) -> int:
        for _ in range(_TRIES):
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise _unusable("can't open the root's lock", self._path, error) from error
            self._lock(fd)
            try:
                if _is_at(fd, self._path):
                    _sign(fd)
                    return fd
            except OSError as error:
                os.close(fd)
                raise _unusable("can't look at the root's lock", self._path, error) from error
            os.close(fd)  # somebody removed the file between open and flock: this is no longer the lock
        raise RootLocked(
            "the root's lock file is being replaced all the time", where=self._path, todo="find out by whom"
        )

    def __enter__(self) -> RootLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            named = _signed(fd)
            os.close(fd)
            if error.errno in _TAKEN:
                raise self._locked(named) from error
            raise _unusable("can't lock the root", self._path, error) from error

    def _close(self) -> None:
        """Close what is open, without unlocking: in a forked child the parent's lock must stay."""
        for fd in (self._fd, self._folder_fd):
            if fd is not None:
                with contextlib.suppress(OSError):  # it is closed, whatever it says
                    os.close(fd)
        if self._place is not None:
            self._place.close()
        self._fd = self._folder_fd = self._place = None

    def _locked(self, named: int | None) -> RootLocked:
        """The error that says who holds the lock, and what can be done about that one."""
        what, todo = "another process writes to this root", "wait for it, end it, or pick another root"
        record = DaemonRecord.read(self.root)
        if record is not None and record.alive():
            seen = f"the daemon with pid {record.pid} at {record.endpoint}"
            todo = 'use it (daemon="attach"), stop it (ckptd stop), or pick another root'
        elif named == os.getpid():
            what, seen = "this process already saves to this root without a daemon", f"pid {named}"
            todo = "close() that client first"
        elif named is not None:
            what = "another process saves to this root without a daemon"
            seen = f"pid {named}, if it isn't a daemon that is just starting or leaving"
        else:
            seen = "a process of another machine or container, or one that is just starting or leaving"
        return RootLocked(what, where=str(self.root.path), seen=seen, todo=todo)


def holder(root: Root) -> int | None:
    """Pid of the living process that the lock file names as its holder; None when it names none. For messages."""
    try:
        fd = os.open(root.service_dir / _FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _signed(fd)
    finally:
        close_all([fd])


def _sign(fd: int) -> None:
    """Leave pid and start time in the file, for the message another process gives. Decides nothing."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, "{} {}\n".format(*own_start()).encode(), 0)


def _signed(fd: int) -> int | None:
    try:
        pid, started = os.pread(fd, 64, 0).split()
        return int(pid) if process_started(int(pid)) == int(started) else None
    except (OSError, ValueError):
        return None


def _unusable(what: str, where: str, error: OSError) -> BadRoot:
    todo = "check the disk, its locks and the limit of open files, or pick another root"
    return BadRoot(what, where=where, seen=str(error), todo=todo)


def _is_at(fd: int, path: str) -> bool:
    try:
        return _inode(os.fstat(fd)) == _inode(os.lstat(path))
    except FileNotFoundError:
        return False


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _close_in_child() -> None:
    """Let a forked child (a DataLoader worker) neither hold the lock beyond its parent's life nor free it."""
    for lock in list(_held):
        lock._close()  # closing a copy frees nothing; LOCK_UN would
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
