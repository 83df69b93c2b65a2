"""A recorder of everything that this process does to the files below a folder.

It stands in for the functions of `os` that change files, and keeps a tree of its own beside the real one; that the
two agree at the end shows that nothing went past it. What lies in shared memory is looked at whenever something
is done.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from crash_place import unbound
from crash_trace import (
    ROOT,
    Mark,
    Memory,
    Names,
    Op,
    Sync,
    Trace,
    Tree,
    Truncate,
    Write,
    apply,
    tree_of,
    tree_on_disk,
)


@dataclass
class _Open:
    inode: int
    offset: int = 0


class Killed(BaseException):
    """What a SIGKILL is to the code: nothing that it would do after it happens."""


class Recorder:
    """Watches one folder.

    Args:
        folder: It.
        memory: Where shared memory lies; None for none.

    Attributes:
        dies_at: After so many operations everything raises Killed; None for never.
        dies_after: So it does once a name with this in it was given.
    """

    def __init__(self, folder: Path, memory: Path | None = None) -> None:
        self.trace = Trace()
        self._memory, self._in_memory = memory, Tree()
        self.dies_at: int | None = None
        self.dies_after = ""
        self._dead = False
        self._base = str(folder.resolve())
        self._lock = threading.RLock()
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._bytes: dict[int, bytearray] = {}
        self._fds: dict[int, _Open] = {}
        self._next = 1
        self._real = {name: getattr(os, name) for name in _WATCHED}
        self._take_over(folder, ROOT, "")

    def mark(self, what: str, about: Any = None) -> None:
        """Note that this was promised, or is about to be seen."""
        with self._lock:
            self._look_at_memory()
            self.trace.ops.append(Mark(what, about))

    def _look_at_memory(self) -> None:
        if self._memory is None or not self._memory.exists():
            return
        if (seen := unbound(tree_on_disk(self._memory))) != self._in_memory:
            self._in_memory = seen
            self.trace.ops.append(Memory(seen))

    def bury(self) -> None:
        """What the kernel does for a process that was killed; the next one lives."""
        self.dies_at, self.dies_after, self._dead = None, "", False
        for fd in list(self._fds):
            with suppress(OSError):
                self._real["close"](fd)
        self._fds.clear()

    def tree(self) -> Tree:
        """Path → bytes, None for a folder, as the recorder has seen it."""
        return tree_of(self._names, self._bytes)

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        with pytest.MonkeyPatch.context() as patch:
            for name in _WATCHED:
                patch.setattr(os, name, getattr(self, f"_{name}"))
            yield self

    def _take_over(self, folder: Path, inode: int, below: str) -> None:
        for path in sorted(folder.iterdir()):
            name = f"{below}{path.name}"
            new = self._new(path.is_dir())
            self._names[inode][path.name] = new
            if path.is_dir():
                self.trace.before[name] = None
                self._take_over(path, new, f"{name}/")
            else:
                self.trace.before[name] = path.read_bytes()
                self._bytes[new] = bytearray(path.read_bytes())

    def _new(self, folder: bool) -> int:
        inode, self._next = self._next, self._next + 1
        if folder:
            self._names[inode] = {}
            self.trace.folders.add(inode)
        else:
            self._bytes[inode] = bytearray()
        return inode

    def _live(self) -> None:
        if self._dead or (self.dies_at is not None and len(self.trace.ops) >= self.dies_at):
            raise Killed

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """(folder, name) of a path below the watched folder; name "" is the folder itself."""
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            if dir_fd not in self._fds:
                return None
            at, parts = self._fds[dir_fd].inode, text.split("/")
        else:
            whole = os.path.normpath(os.path.join(self._real["getcwd"](), text))
            if whole == self._base:
                return ROOT, ""
            if not whole.startswith(self._base + "/"):
                return None
            at, parts = ROOT, whole[len(self._base) + 1 :].split("/")
        for part in parts[:-1]:
            at = self._names[at][part]
        return at, parts[-1]

    def _note(self, *ops: Op) -> None:
        self._look_at_memory()
        for op in ops:
            self.trace.ops.append(op)
            if isinstance(op, Names):
                for name, inode in op.changes:
                    if inode is None:
                        self._names[op.folder].pop(name)
                    else:
                        self._names[op.folder][name] = inode
                        self._dead |= bool(self.dies_after) and self.dies_after in name
            elif isinstance(op, (Write, Truncate)):
                apply(self._bytes[op.file], op)

    # --- the functions of os ---------------------------------------------------------------------

    def _getcwd(self) -> str:
        return str(self._real["getcwd"]())

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._live()
        with self._lock:
            fd: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
            self._fds.pop(fd, None)
            place = self._place(path, dir_fd)
            if place is None:
                return fd
            folder, name = place
            if not name:
                self._fds[fd] = _Open(ROOT)
                return fd
            if name not in self._names[folder]:
                self._note(Names(folder, ((name, self._new(False)),)))
            inode = self._names[folder][name]
            self._fds[fd] = _Open(inode)
            if flags & os.O_TRUNC:
                self._note(Truncate(inode, 0))
            return fd

    def _close(self, fd: int) -> None:
        with self._lock:
            self._fds.pop(fd, None)
            self._real["close"](fd)

    def _wrote(self, fd: int, data: bytes, offset: int | None) -> None:
        with self._lock:
            if (of := self._fds.get(fd)) is not None:
                self._note(Write(of.inode, of.offset if offset is None else offset, data))
                of.offset += len(data) if offset is None else 0

    def _write(self, fd: int, data: Any) -> int:
        self._live()
        done: int = self._real["write"](fd, data)
        self._wrote(fd, bytes(data[:done]), None)
        return done

    def _writev(self, fd: int, buffers: Any) -> int:
        self._live()
        done: int = self._real["writev"](fd, buffers)
        self._wrote(fd, b"".join(buffers)[:done], None)
        return done

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        self._live()
        done: int = self._real["pwrite"](fd, data, offset)
        self._wrote(fd, bytes(data[:done]), offset)
        return done

    def _pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        self._live()
        done: int = self._real["pwritev"](fd, buffers, offset)
        self._wrote(fd, b"".join(buffers)[:done], offset)
        return done

    def _ftruncate(self, fd: int, size: int) -> None:
        self._live()
        self._real["ftruncate"](fd, size)
        with self._lock:
            if (of := self._fds.get(fd)) is not None:
                self._note(Truncate(of.inode, size))

    def _synced(self, how: str, fd: int) -> None:
        self._live()
        self._real[how](fd)
        with self._lock:
            if (of := self._fds.get(fd)) is not None:
                self._note(Sync(of.inode, _barrier()))

    def _fsync(self, fd: int) -> None:
        self._synced("fsync", fd)

    def _fdatasync(self, fd: int) -> None:
        self._synced("fdatasync", fd)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._live()
        with self._lock:
            self._real["mkdir"](path, mode, dir_fd=dir_fd)
            if (place := self._place(path, dir_fd)) is not None:
                self._note(Names(place[0], ((place[1], self._new(True)),)))

    def _take_away(self, how: str, path: Any, dir_fd: int | None) -> None:
        self._live()
        with self._lock:
            place = self._place(path, dir_fd)
            self._real[how](path, dir_fd=dir_fd)
            if place is not None:
                self._note(Names(place[0], ((place[1], None),)))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away("unlink", path, dir_fd)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away("remove", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away("rmdir", path, dir_fd)

    def _move(self, how: str, src: Any, dst: Any) -> None:
        self._live()
        with self._lock:
            at, to = self._place(src, None), self._place(dst, None)
            self._real[how](src, dst)
            if at is None or to is None:
                assert at is to is None, f"{src} → {dst} goes over the edge of what is watched"
                return
            inode = self._names[at[0]][at[1]]
            if at[0] == to[0]:
                self._note(Names(at[0], ((at[1], None), (to[1], inode))))
            else:
                self._note(Names(to[0], ((to[1], inode),)), Names(at[0], ((at[1], None),), moved=True))

    def _rename(self, src: Any, dst: Any) -> None:
        self._move("rename", src, dst)

    def _replace(self, src: Any, dst: Any) -> None:
        self._move("replace", src, dst)


_WATCHED: Final = (
    "getcwd", "open", "close", "write", "writev", "pwrite", "pwritev", "ftruncate", "fsync", "fdatasync", "mkdir",
    "unlink", "remove", "rmdir", "rename", "replace",
)  # fmt: skip


_SMALL: Final = frozenset({"durable._fsync"})


def _barrier() -> str:
    """Who asked for a sync: the functions of durable.py, and the two of ours that called them."""
    names: list[str] = []
    callers = 0
    frame = sys._getframe(3)
    while frame is not None and callers < 2:
        file = Path(frame.f_code.co_filename)
        if {"ckptd", "ckptd_daemon"} & set(file.parts[-3:]):
            if (name := f"{file.stem}.{frame.f_code.co_name}") not in _SMALL:
                names.append(name)
            callers += file.stem != "durable"
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(names)
