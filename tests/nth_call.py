"""Calls of the system that fail: the N-th of a kind below some folders, once or from then on.

It stands in for the functions of `os`, `io` and `mmap` in this process, or in another one that is started with
`environment()`: which call is to fail lies in a few bytes of memory that both see, so that a process is never
started anew for the next one. What was met is counted: nothing passes because nothing was injected.

Imports the standard library alone: it is at work before anything else is imported in a child.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import mmap
import os
import shutil  # noqa: F401 - it looks at once whether the functions of os are the real ones
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

#: Which errors a kind of call can really end with; "short" does half of it; with "cut" the power goes just before it.
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "open": ("EMFILE", "EIO", "ENOSPC", "ENFILE", "EROFS", "EDQUOT", "ENOMEM"),
    "read": ("EIO", "ENOMEM"),
    "write": ("ENOSPC", "EIO", "short", "EDQUOT"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("EIO", "ENOSPC", "EROFS", "EDQUOT", "ENOMEM"),
    "mkdir": ("ENOSPC", "EIO", "EDQUOT", "EROFS", "ENOMEM"),
    "unlink": ("EIO", "EROFS", "EBUSY", "ENOMEM"),
    "close": ("EIO", "ENOSPC", "EDQUOT"),
    "mmap": ("ENOMEM", "ENFILE"),
    "allocate": ("ENOSPC", "EIO", "EDQUOT"),
    "statvfs": ("EIO", "ENOMEM"),
    "start": ("EIO", "ENOSPC", "EINVAL"),
    "list": ("EIO", "EMFILE", "ENFILE", "ENOMEM"),
    "stat": ("EIO", "ENOMEM"),
    "change": ("EROFS", "ENOSPC", "EIO"),
}

#: Function of os → its kind. "change" is any of those that change something.
_PATHS: Final = {
    "open": "open", "mkdir": "mkdir", "unlink": "unlink", "remove": "unlink", "rmdir": "unlink", "rename": "rename",
    "replace": "rename", "listdir": "list", "scandir": "list", "stat": "stat", "lstat": "stat", "statvfs": "statvfs",
}  # fmt: skip
_DESCRIPTORS: Final = {
    "read": "read", "pread": "read", "preadv": "read", "write": "write", "pwrite": "write", "pwritev": "write",
    "fsync": "fsync", "close": "close", "ftruncate": "allocate", "posix_fallocate": "allocate", "fstat": "stat",
}  # fmt: skip
_CHANGING: Final = frozenset({"write", "fsync", "rename", "mkdir", "unlink", "allocate"})
_HOWS: Final = sorted({"cut"} | {how for hows in KINDS.values() for how in hows})
_ORDER: Final = struct.Struct("qqqqqq")  # left, kind, how, lasting, met, seen
_SITE: Final = Path(__file__).with_name("failing_site")
_FOLDER_ENV: Final = "CKPTD_TEST_FAILING"
_BELOW_ENV: Final = "CKPTD_TEST_FAILING_BELOW"


class Orders:
    """Which call is to fail, in memory that several processes may see. One of them counts.

    Args:
        memory: Where it lies.
        fd: A file that is locked while it is changed, if other processes see it: what one of them counted last would
            take a new order's place.

    Attributes:
        met: Calls that failed since the last order.
        seen: Calls of that kind since then.
    """

    def __init__(self, memory: mmap.mmap, fd: int = -1) -> None:
        self._memory, self._fd, self._changing, self._looking = memory, fd, threading.Lock(), False

    @classmethod
    def here(cls) -> Orders:
        """For this process alone."""
        return cls(mmap.mmap(-1, mmap.PAGESIZE))

    @classmethod
    def at(cls, path: Path) -> Orders:
        """In a file, which is made when it is missing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(mmap.mmap(fd, mmap.PAGESIZE), fd)

    def fail(self, kind: str, number: int, how: str, *, lasting: bool = False) -> None:
        """The number-th call from now on of that kind fails; `lasting`: and all after it, until `works`."""
        with self._alone():
            self._put(number, list(KINDS).index(kind), _HOWS.index(how), int(lasting), 0, 0)

    def works(self) -> None:
        """From now on nothing fails; what was met stays."""
        with self._alone():
            left, *others = self._get()
            self._put(0 if left else left, *others)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Meanwhile nothing fails or counts in this process: it is the test that looks."""
        before, self._looking = self._looking, True
        try:
            yield
        finally:
            self._looking = before

    @property
    def met(self) -> int:
        return self._get()[4]

    @property
    def seen(self) -> int:
        return self._get()[5]

    def due(self, kind: str) -> str | None:
        """Count a call; how it is to fail, None if it isn't."""
        with self._alone():
            left, ordered, how, lasting, met, seen = self._get()
            if left == 0 or self._looking or not self._fits(kind, ordered):
                return None
            left, seen = left - 1, seen + 1
            if left > 0:
                self._put(left, ordered, how, lasting, met, seen)
                return None
            self._put(1 if lasting else 0, ordered, how, lasting, met + 1, seen)
            return _HOWS[how]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._changing:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if self._fd >= 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _fits(self, kind: str, ordered: int) -> bool:
        wanted = list(KINDS)[ordered]
        return kind == wanted or (wanted == "change" and kind in _CHANGING)

    def _get(self) -> tuple[int, ...]:
        return _ORDER.unpack_from(self._memory)

    def _put(self, *values: int) -> None:
        _ORDER.pack_into(self._memory, 0, *values)


class Failing:
    """The functions that stand in for the real ones.

    Args:
        orders: What is to fail.
        below: Only calls on what lies below these folders count.
        cut: What cuts the power.
    """

    def __init__(
        self, orders: Orders, below: Iterable[str], cut: Callable[[], object] = lambda: None
    ) -> None:
        self._orders, self._cut = orders, cut
        self._below = tuple(os.path.realpath(folder) for folder in below)
        self._readlink, self._getcwd = os.readlink, os.getcwd

    def stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        """(module, name, function) of each."""
        for name, kind in _PATHS.items():
            yield os, name, self._of_path(getattr(os, name), kind)
        for name, kind in _DESCRIPTORS.items():
            yield os, name, self._of_descriptor(getattr(os, name), kind)
        opener = self._opener()
        yield io, "open", opener
        yield builtins, "open", opener
        yield mmap, "mmap", self._mapping()

    def _of_path(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(path: Any = ".", *more: Any, **options: Any) -> Any:
            is_fd = isinstance(path, int)
            where = self._of_fd(path) if is_fd else self._whole(path, options.get("dir_fd"))
            self._obey(kind, where)
            return real(path, *more, **options)

        return call

    def _opener(self) -> Callable[..., Any]:
        by_path, by_fd = self._of_path(io.open, "open"), self._of_path(io.open, "stat")

        def call(file: Any, *more: Any, **options: Any) -> Any:
            return (by_fd if isinstance(file, int) else by_path)(file, *more, **options)

        return call

    def _of_descriptor(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(fd: int, *more: Any) -> Any:
            where = self._of_fd(fd)
            try:
                how = self._obey(kind, where)
            except OSError:
                if kind == "close":
                    real(fd)  # it is closed whatever it says
                raise
            if how == "short":
                return real(fd, *_half(more[0]), *more[1:])
            return real(fd, *more)

        return call

    def _mapping(self) -> type[mmap.mmap]:
        obey, of_fd, real = self._obey, self._of_fd, mmap.mmap

        class Mapping(mmap.mmap):
            def __new__(cls, fd: int, *more: Any, **options: Any) -> Any:
                obey("mmap", of_fd(fd) if fd >= 0 else None, anywhere=fd < 0)
                return real.__new__(cls, fd, *more, **options)

        return Mapping

    def started(self, call: Any) -> Any:
        """For libc's sync_file_range."""

        def start(fd: int, *more: int) -> int:
            try:
                self._obey("start", self._of_fd(fd))
            except OSError as error:
                import ctypes

                ctypes.set_errno(error.errno or 0)
                return -1
            return int(call(fd, *more))

        return start

    def _obey(self, kind: str, where: str | None, *, anywhere: bool = False) -> str | None:
        """How it is to be done, None for as always; raises what it is to raise."""
        if not anywhere and (where is None or not self._is_below(where)):
            return None
        how = self._orders.due(kind)
        if how == "cut":
            self._cut()
        if how in (None, "short", "cut"):
            return how
        code = getattr(errno, how)
        raise OSError(code, os.strerror(code), where)

    def _is_below(self, where: str) -> bool:
        return any(where == folder or where.startswith(folder + "/") for folder in self._below)

    def _of_fd(self, fd: int) -> str | None:
        try:
            return self._readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return None

    def _whole(self, path: Any, dir_fd: int | None) -> str | None:
        text = os.fsdecode(path)
        if os.path.isabs(text):
            return text
        folder = self._getcwd() if dir_fd is None else self._of_fd(dir_fd)
        return None if folder is None else os.path.normpath(os.path.join(folder, text))


def _half(data: Any) -> tuple[Any]:
    """The first half of what is to be written, a byte at least; of several pieces the first one."""
    if isinstance(data, (list, tuple)):
        return (_half(data[0]),) if len(data) == 1 else (data[: max(1, len(data) // 2)],)
    view = memoryview(data).cast("B")
    return (view[: max(1, len(view) // 2)],)


@contextmanager
def failing(orders: Orders, *below: Path, cut: Callable[[], object] = lambda: None) -> Iterator[None]:
    """In this process, until the end of the context."""
    import pytest

    from ckptd.disk import write_mode
    from ckptd.snapshot.mapped_memory import MappedMemory

    stand_in = Failing(orders, map(str, below), cut)
    with pytest.MonkeyPatch.context() as patch:
        real = write_mode._sync_file_range()
        for module, name, function in list(stand_in.stand_ins()):
            patch.setattr(module, name, function)
        patch.setattr(MappedMemory, "__new__", mmap.mmap.__new__)
        patch.setattr(write_mode, "_sync_file_range", lambda: stand_in.started(real))
        try:
            yield
        finally:
            orders.works()


def environment(folder: Path, *below: Path) -> dict[str, str]:
    """For a process that is to obey; its orders are `orders_of(folder, …)`, and its children's too."""
    tests = str(Path(__file__).parent)
    path = os.pathsep.join([str(_SITE), tests, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {
        "PYTHONPATH": path.rstrip(os.pathsep),
        _FOLDER_ENV: str(folder),
        _BELOW_ENV: os.pathsep.join(map(str, below)),
    }


def orders_of(folder: Path, who: str) -> Orders:
    """Those of a "daemon", a "verifier" or a "trainer" that was started with `environment(folder)`."""
    return Orders.at(folder / who)


def obey_in_this_process() -> None:
    """What a child does first (failing_site/sitecustomize.py)."""
    folder = os.environ.get(_FOLDER_ENV)
    if not folder:
        return
    said = " ".join(sys.orig_argv)
    who = "verifier" if "ckptd_daemon.verify" in said else "daemon" if "ckptd_daemon" in said else "trainer"
    stand_in = Failing(orders_of(Path(folder), who), os.environ[_BELOW_ENV].split(os.pathsep))
    from ckptd.disk import write_mode

    real = write_mode._sync_file_range()
    for module, name, function in list(stand_in.stand_ins()):
        setattr(module, name, function)
    write_mode._sync_file_range = lambda: stand_in.started(real)
