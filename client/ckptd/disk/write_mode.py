"""How the bytes of large files get from memory to the medium, found out once per root by really doing it.

- "direct": O_DIRECT. The device reads the snapshot's memory itself: no copy into the page cache, no CPU for it.
- "early": through the page cache, each piece sent on its way (sync_file_range) while the next is copied.
- "plain": through the page cache, and the kernel decides when.

Whatever the mode, the file's bytes are the same and every file is synced: none of them makes anything durable.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import threading
from pathlib import Path
from typing import Any, Final, Literal

from ckptd.disk.own_leftovers import unlink_quietly
from ckptd.limits import PAGE_ALIGNMENT
from ckptd.names import work_folder

Mode = Literal["direct", "early", "plain"]

log = logging.getLogger(__name__)

#: What a file system says to an operation that it hasn't.
UNSUPPORTED: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ESPIPE)

_START_WRITING: Final = 2  # SYNC_FILE_RANGE_WRITE
_AFTER: Final[dict[Mode, Mode]] = {"direct": "early", "early": "plain"}


class Refused(Exception):
    """The file system took the mode and then refused a write in it."""


class WriteMode:
    """The mode of one root. It is found out once; afterwards it only falls back.

    Args:
        mode: One that is known; None to find out.

    Attributes:
        now: The mode to write in; "plain" until it is found out.
        reason: Why it isn't a better one; "" when it is the best.
    """

    def __init__(self, mode: Mode | None = None) -> None:
        self.now: Mode = mode or "plain"
        self.reason = "" if mode else "not found out yet"
        self._known = mode is not None
        self._changing = threading.Lock()

    def __repr__(self) -> str:
        return f"WriteMode({self.now!r}, {self.reason!r})"

    def find_out(self, folder: Path) -> None:
        """Try in this folder, unless it is known. A disk that is full or broken is asked again next time.

        The caller holds the root's lock, and the folder is one whose temporary names are swept.
        """
        if self._known:
            return
        try:
            self.now, self.reason = _try_out(folder)
            self._known = True
        except OSError as error:
            self.reason = f"it could not be tried: {error.strerror or error}"
        log.info("write.mode mode=%s reason=%s", self.now, self.reason or "-")

    def refused(self, mode: Mode, why: str) -> Mode:
        """The mode to write in instead; for later files too."""
        with self._changing:
            if self.now == mode:
                self.now, self.reason = _AFTER[mode], f"{mode}: {why}"
                log.warning("write.fell_back mode=%s reason=%s", self.now, self.reason)
            return _AFTER[mode]


def set_direct(fd: int) -> None:
    """Let an open file go round the page cache.

    Raises:
        OSError: One of UNSUPPORTED where it can't.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def start_writing(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to write these bytes back, without waiting for it.

    Raises:
        OSError: One of UNSUPPORTED where it can't; any other is a failure of the medium.
    """
    call = _sync_file_range()
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(fd, offset, nbytes, _START_WRITING) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _sync_file_range() -> Any:
    """libc's function, which lets go of the GIL; None where there is none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def _try_out(folder: Path) -> tuple[Mode, str]:
    """The best mode that works in a folder, and why none better does."""
    path = folder / work_folder("tmp", 0)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            set_direct(fd)
            if _same_after_direct(fd):
                return "direct", ""
            reason = "direct: what was written was not what was read"
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            reason = f"direct: {error.strerror}"
        try:
            start_writing(fd, 0, PAGE_ALIGNMENT)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return "plain", f"{reason}; early: {error.strerror}"
        return "early", reason
    finally:
        try:
            os.close(fd)
        finally:
            unlink_quietly(path)


def _same_after_direct(fd: int) -> bool:
    """Write as a file is written, several pieces at once and an odd end, and read it back from the medium."""
    length, end = 3 * PAGE_ALIGNMENT, 3 * PAGE_ALIGNMENT - 100
    written, read = memoryview(mmap.mmap(-1, length)), memoryview(mmap.mmap(-1, length))
    written[:] = os.urandom(length)
    count = os.pwritev(fd, [written[:PAGE_ALIGNMENT], written[PAGE_ALIGNMENT:]], 0)
    os.ftruncate(fd, end)
    return (count, os.preadv(fd, [read], 0)) == (length, end) and read[:end] == written[:end]
