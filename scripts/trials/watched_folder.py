"""A folder in which every operation of every process is recorded, also of code that isn't Python: a file system of its own.

It lies in memory and is reached through FUSE, so it needs root or fusermount3, libfuse3, and `pip install mfusepy`.
The trace is that of tests/crash_trace.py. `os.mkdir(FOLDER/.told-WHAT-NUMBER)` sets a mark in it.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import mfusepy
from mfusepy import FuseOSError

from crash_trace import ROOT, Mark, Names, Sync, Trace, Truncate, Write, apply

_MARK = ".told-"


class Recording(mfusepy.Operations):  # type: ignore[misc]
    """The file system. Ends with `umount`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._bytes: dict[int, bytearray] = {}
        self._modes = {ROOT: 0o777 | stat.S_IFDIR}
        self._next, self._marked = 1, ""

    # --- names -----------------------------------------------------------------------------------

    def _place(self, path: str) -> tuple[int, str]:
        *above, name = path.strip("/").split("/")
        folder = ROOT
        for part in above:
            folder = self._names.get(folder, {}).get(part, -1)
        if folder not in self._names:
            raise FuseOSError(errno.ENOENT)
        return folder, name

    def _inode(self, path: str) -> int:
        if path == "/":
            return ROOT
        folder, name = self._place(path)
        if name not in self._names[folder]:
            raise FuseOSError(errno.ENOENT)
        return self._names[folder][name]

    def _change(self, folder: int, *changes: tuple[str, int | None], moved: bool = False) -> None:
        self.trace.ops.append(Names(folder, changes, moved))
        for name, inode in changes:
            if inode is None:
                self._names[folder].pop(name, None)
            else:
                self._names[folder][name] = inode

    def _new(self, path: str, mode: int) -> int:
        folder, name = self._place(path)
        inode, self._next = self._next, self._next + 1
        self._modes[inode] = mode
        if stat.S_ISDIR(mode):
            self._names[inode] = {}
            self.trace.folders.add(inode)
        else:
            self._bytes[inode] = bytearray()
        self._change(folder, (name, inode))
        return inode

    def mkdir(self, path: str, mode: int) -> int:
        name = path.rpartition("/")[2]
        if name.startswith(_MARK):
            self._marked = path
            what, _, number = name[len(_MARK) :].partition("-")
            self.trace.ops.append(Mark(what, int(number)))
        else:
            self._new(path, stat.S_IFDIR | mode)
        return 0

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return self._new(path, stat.S_IFREG | (mode & 0o7777))

    def unlink(self, path: str) -> int:
        folder, name = self._place(path)
        self._inode(path)
        self._change(folder, (name, None))
        return 0

    def rmdir(self, path: str) -> int:
        if self._names[self._inode(path)]:
            raise FuseOSError(errno.ENOTEMPTY)
        return self.unlink(path)

    def rename(self, old: str, new: str) -> int:
        inode, (at, name), (to, other) = self._inode(old), self._place(old), self._place(new)
        if at == to:
            self._change(at, (name, None), (other, inode))
        else:
            self._change(to, (other, inode))
            self._change(at, (name, None), moved=True)
        return 0

    # --- what is asked ---------------------------------------------------------------------------

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if path.rpartition("/")[2].startswith(_MARK):
            if path == self._marked:  # asked for by the mkdir itself
                return {"st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2, "st_ino": 1_000_000}
            raise FuseOSError(errno.ENOENT)
        inode = self._inode(path)
        size = len(self._bytes[inode]) if inode in self._bytes else 0
        return {"st_mode": self._modes[inode], "st_nlink": 1, "st_size": size, "st_ino": inode + 1}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._names[self._inode(path)]]

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_TRUNC:  # the kernel leaves it to us
            self.truncate(path, 0)
        return self._inode(path)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return bytes(self._bytes[fh][offset : offset + size])

    def statfs(self, path: str) -> dict[str, int]:
        return {
            "f_bsize": 4096,
            "f_frsize": 4096,
            "f_blocks": 1 << 20,
            "f_bfree": 1 << 20,
            "f_bavail": 1 << 20,
        }

    def chmod(self, path: str, mode: int) -> int:
        inode = self._inode(path)
        self._modes[inode] = stat.S_IFMT(self._modes[inode]) | (mode & 0o7777)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        return 0

    # --- what is written -------------------------------------------------------------------------

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        op = Write(fh, offset, bytes(data))
        self.trace.ops.append(op)
        apply(self._bytes[fh], op)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        op = Truncate(self._inode(path), length)
        self.trace.ops.append(op)
        apply(self._bytes[op.file], op)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.trace.ops.append(Sync(fh, "fsync of a file"))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.trace.ops.append(Sync(self._inode(path), "fsync of a folder"))
        return 0


@contextmanager
def watched(folder: Path) -> Iterator[Trace]:
    """Everything done below the folder goes into the trace, until the end; nothing of it stays."""
    folder.mkdir()
    recording = Recording()

    def serve() -> None:
        mfusepy.FUSE(recording, str(folder), foreground=True, nothreads=True, allow_other=False)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not folder.is_mount():
        if time.monotonic() > deadline or not thread.is_alive():
            raise OSError("no FUSE here: it takes root, libfuse3 and mfusepy")
        time.sleep(0.01)
    try:
        yield recording.trace
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        thread.join(30)
        folder.rmdir()
