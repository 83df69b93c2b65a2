"""newest.json of a run: which checkpoint is the newest, for as long as no name in the run's folder changes.

A listing costs more with every name in the folder; its times tell without one that nothing came, went or was renamed
since. They do only where nothing can change within the times that are noted. What must be true of a note:

- The folder's time was over, by the clock of its file system, before the names were looked at: whatever changes later
  gets another one. No file system that knows only whole seconds, and no other boot of the machine, gets away with it.
- Whoever looked at the names did so after that, and with nobody in the middle of changing them.
- It is written in place, for a new file would change the folder. Half of it fails its hash, and is none.

It is a cache: where it is missing, old, or wrong, the folder is listed. Only the daemon writes it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.disk.run_index import Mark
from ckptd.errors import CorruptCheckpoint
from ckptd.names import NEWEST_FILE

SCHEMA: Final = "ckpt.v2-run-newest.1"

_MOST_BYTES: Final = 4096
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_SECOND_NS: Final = 1_000_000_000


class Newest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one with the highest sequence.

    Attributes:
        name, sequence: Which.
        token: Its folder's (run_index.token_of).
        mark: Of its verification; None when it isn't verified.
    """

    name: str
    sequence: int
    token: str
    mark: Mark | None


class _File(Newest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    boot: str
    folder: str
    sha256: str


@dataclass(frozen=True, slots=True)
class FolderState:
    """A run's folder as its times have it. Two equal ones prove nothing by themselves."""

    place: tuple[int, int]
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, run_dir: Path) -> FolderState:
        """Now. Raises OSError."""
        found = os.stat(run_dir)
        return cls((found.st_dev, found.st_ino), found.st_mtime_ns, found.st_ctime_ns)


def read_newest(run_dir: Path, state: FolderState) -> Newest | None:
    """The newest of the folder as it was in that state; None when nobody noted it."""
    where = str(run_dir / NEWEST_FILE)
    try:
        folder = open_folder(run_dir)
        try:
            data = read_small_file(folder, NEWEST_FILE, where, _MOST_BYTES)
        finally:
            os.close(folder)
        file = _decode(data)
    except (OSError, CorruptCheckpoint, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    wanted = _signed(msgspec.structs.replace(file, schema=SCHEMA, boot=_boot(), folder=str(state), sha256=""))
    return file if data == wanted and file.boot else None


def note_newest(run_dir: Path, newest: Callable[[], Newest | None]) -> bool:
    """Note which is the newest, if the folder's state can stand for its names now.

    Args:
        run_dir: The run's folder.
        newest: Tells which it is, by the names as they are when it is called; None when that can't be told.

    Returns:
        Whether it is noted.

    Raises:
        OSError: It can't be written; what is there counts for nothing.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(run_dir / NEWEST_FILE, flags, 0o666)
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
            return False  # whatever else has this name, or that file, isn't written to
        state = FolderState.of(run_dir)
        _put(fd, b"\n")
        over = state.ctime_ns < os.fstat(fd).st_mtime_ns and state.ctime_ns % _SECOND_NS != 0
        if not over or not _boot():
            return False
        _wait_for_who_changes_names(run_dir)
        found = newest()
        if found is None or FolderState.of(run_dir) != state:
            return False
        _put(fd, _bytes(found, state))
        return True
    finally:
        os.close(fd)


def _wait_for_who_changes_names(run_dir: Path) -> None:
    """A name changes, the folder's times with it, and only then it is told of, all under one lock of the folder's: to
    look up a name that nobody has looked up before takes that lock."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(run_dir / f".look-{os.urandom(16).hex()}")


def _put(fd: int, data: bytes) -> None:
    os.pwrite(fd, data, 0)
    os.ftruncate(fd, len(data))


def _bytes(newest: Newest, state: FolderState) -> bytes:
    fields = {name: getattr(newest, name) for name in newest.__struct_fields__}
    return _signed(_File(**fields, schema=SCHEMA, boot=_boot(), folder=str(state), sha256=""))


def _signed(unsigned: _File) -> bytes:
    sha256 = hashlib.sha256(_spell(unsigned)).hexdigest()
    return _spell(msgspec.structs.replace(unsigned, sha256=sha256)) + b"\n"


@functools.cache
def _boot() -> str:
    """Tells one run of the machine from another: what wasn't synced may be gone after it. "" when nobody knows."""
    try:
        return _BOOT.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


_spell: Final = msgspec.json.Encoder(order="deterministic").encode
_decode: Final = msgspec.json.Decoder(_File).decode
