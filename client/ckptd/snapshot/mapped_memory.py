"""Mapped memory that others may have made arrangements for, which end before it is unmapped.

A file that is made shorter while it is mapped is met by SIGBUS, in whoever touches what is gone. `holding` leads a
handler of that signal from an address to the map it is in; ckptd_daemon.core.cut_memory has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from ckptd.errors import ProtocolError

__all__ = ["MappedMemory", "holding"]

_watched: weakref.WeakSet[MappedMemory] = weakref.WeakSet()


class MappedMemory(mmap.mmap):
    """A map with one thing to do first, when it is closed.

    Attributes:
        before_unmap: Called once, at close(); None for nothing.
        cut: Whether zeros stand for a part of it that its file no longer has.
        file: Device and inode of its file; None for none.
    """

    before_unmap: Callable[[], object] | None = None
    cut = False
    file: tuple[int, int] | None = None

    @classmethod
    def of(cls, fd: int, size: int) -> MappedMemory:
        """The file that `fd` is open on, mapped."""
        mapping, found = cls(fd, size), os.fstat(fd)
        mapping.file = found.st_dev, found.st_ino
        return mapping

    def in_place(self, path: Path) -> bool:
        """Whether its file is the one at `path` still, as far as that can be told."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return self.file is None
        except OSError:
            return True
        return self.file in (None, (found.st_dev, found.st_ino))

    def close(self) -> None:
        """Unmap it. BufferError while views of it live; it goes with the last of them then."""
        before, self.before_unmap = self.before_unmap, None
        if before is not None:
            before()
        super().close()

    def watch(self) -> None:
        """From now on `holding` knows it."""
        _watched.add(self)

    def refuse_cut(self, path: Path) -> None:
        """Raise ProtocolError if its file, at `path`, is shorter than it, or was when it was read."""
        size = len(self)
        with contextlib.suppress(OSError):  # no file, or no longer one by this name
            size = path.stat().st_size
        if self.cut or size < len(self):
            raise ProtocolError("the slot was cut short", where=path.name, todo="take the snapshot again")


def holding(address: int) -> tuple[MappedMemory, int] | None:
    """The watched map with this address in it, and where it begins."""
    for memory in list(_watched):
        with contextlib.suppress(ValueError):  # closed
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if start <= address < start + len(memory):
                return memory, start
    return None
