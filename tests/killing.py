"""SIGKILL of this process at its N-th call that changes something: a file below some folders, or a slot's header.

That it dies just before the N-th call is the same as just after the one before it, so every N is every state that a
kill can leave; but for what is written in pieces: `half` writes the first half of it and dies then.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from ckptd.snapshot import slot_header
from ckptd.snapshot.slots import Slot

_OF_PATHS: Final = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir")
_OF_DESCRIPTORS: Final = ("ftruncate", "fsync", "posix_fallocate")
_WRITES: Final = ("write", "pwrite", "pwritev")


class Killing:
    """Stands in for functions of `os`, and for Slot's, until this process is dead. Never taken back.

    A file that was opened with O_CREAT is empty until the next of these calls, so that opening needs no number.

    Args:
        number: Which call is the last, from 1; 0 for none.
        below: Only what lies below these folders counts.
        half: Do the first half of a write before.

    Attributes:
        calls: How many there were.
    """

    def __init__(self, number: int, below: Iterable[str], *, half: bool = False) -> None:
        self.calls = 0
        self._number, self._below, self._half = number, tuple(f"{folder}/" for folder in below), half
        self._counting = threading.Lock()
        for name in _OF_PATHS:
            setattr(os, name, self._of_path(getattr(os, name)))
        for name in _OF_DESCRIPTORS:
            setattr(os, name, self._of_descriptor(getattr(os, name)))
        for name in _WRITES:
            setattr(os, name, self._of_write(getattr(os, name)))
        Slot._write = self._of_header(Slot._write)  # type: ignore[method-assign]

    def _is_last(self, where: str) -> bool:
        """Count a call."""
        if not where.startswith(self._below):
            return False
        with self._counting:
            self.calls += 1
            return self.calls == self._number

    def _of_path(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **options: Any) -> Any:
            folder = options.get("dir_fd")
            where = os.fsdecode(path) if folder is None else os.path.join(_path_of(folder), os.fsdecode(path))
            if self._is_last(where):
                kill()
            return real(path, *more, **options)

        return call

    def _of_descriptor(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *more: Any) -> Any:
            if self._is_last(_path_of(fd)):
                kill()
            return real(fd, *more)

        return call

    def _of_write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, data: Any, *more: Any) -> int:
            if self._is_last(_path_of(fd)):
                if self._half:
                    real(fd, data[: len(data) // 2], *more)
                kill()
            return real(fd, data, *more)

        return call

    def _of_header(self, real: Callable[..., bytes]) -> Callable[..., bytes]:
        def write(slot: Slot, start: int, counter: int, header: Any) -> bytes:
            if self._is_last(str(slot.path)):
                if self._half:
                    packed = slot_header.pack(counter, header)[: slot_header.PACKED_BYTES // 2]
                    slot._all[start : start + len(packed)] = packed
                kill()
            return real(slot, start, counter, header)

        return write


def kill() -> NoReturn:
    """Nothing of this process happens after it."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # one of several threads may come so far: it is gone before it can go on
        signal.pause()


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
