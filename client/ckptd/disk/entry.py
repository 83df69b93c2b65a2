"""One checkpoint folder as a look at it shows: what its index says, and whether it can be relied on.

What must be true: an error of the machine or the medium says nothing about the checkpoint. Only what is really
there (another form, another size, nothing) makes it corrupt or incomplete; all else is "unreadable", for now.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ckptd.disk.folder_files import open_folder
from ckptd.disk.index_files import files_of
from ckptd.errors import CorruptCheckpoint, ReadFailed
from ckptd.format.records import CheckpointIndex, read_index
from ckptd.names import parse_step_folder

Status = Literal["committed", "incomplete", "corrupt", "unreadable"]

#: What this process or machine lacks; with these no answer at all is right.
MACHINE_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_RIGHTS: Final = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One checkpoint folder.

    Attributes:
        name, path: The folder.
        step, repeat: From its name.
        index: Its index; None when that can't be read, or isn't the one of this folder.
        status: "committed": its index is right and its files are there (their hashes are another matter);
            "incomplete": the index or a file is missing; "corrupt": the index is wrong; "unreadable": an error
            of the machine or the medium keeps us from telling.
        reason: Why it isn't committed; "" when it is.
        error: The errno of an unreadable one, else 0.
        not_ours: It is another user's, so that no run of ours committed it.
        hint: Its sequence as the run's index knew it, for one without an index; None when that doesn't know.
        own: It belongs to this run, by its run_id; False also when that can't be told.
        on_line: It is on the line that ends at the head, or nobody can tell.
        verified: The run's index has a mark for exactly these files.
        changed: It has a mark for this checkpoint, but its files aren't those that were verified any more.
        identity: Of the folder (folder_identity); "" when it couldn't be opened.
    """

    name: str
    path: Path
    step: int
    repeat: int
    index: CheckpointIndex | None
    status: Status
    reason: str = ""
    error: int = 0
    not_ours: bool = False
    hint: int | None = None
    own: bool = False
    on_line: bool = True
    verified: bool = False
    changed: bool = False
    identity: str = ""

    @property
    def sequence(self) -> int | None:
        """Its place in the run's order; None when its index can't be read."""
        return self.index.sequence if self.index else None

    @property
    def is_in_doubt(self) -> bool:
        """It can't be read now and may be this run's own."""
        return self.status == "unreadable" and (self.own if self.index else not self.not_ours)


def read_entry(path: Path) -> Entry | None:
    """Look at a checkpoint folder; None when there is none (any more)."""
    step, repeat = parse_step_folder(path.name) or (0, 0)

    index: CheckpointIndex | None = None
    identity = ""

    def entry(status: Status, reason: str, index: CheckpointIndex | None = None, error: int = 0) -> Entry:
        return Entry(
            name=path.name, path=path, step=step, repeat=repeat, index=index, status=status, reason=reason,
            error=error, not_ours=error in _RIGHTS and _is_anothers(path), identity=identity,
        )  # fmt: skip

    try:
        folder = open_folder(path)
    except (FileNotFoundError, NotADirectoryError):  # O_NOFOLLOW with O_DIRECTORY: ENOTDIR for a link too
        return None
    except OSError as error:
        return entry("unreadable", cannot_read(error), error=error.errno or errno.EIO)
    try:
        identity = folder_identity(os.fstat(folder))
        index = read_index(folder, where=str(path))
        if index.step != step:
            return entry("corrupt", f"index.json is that of another checkpoint: it says step {index.step}")
        missing = _missing(folder, index)
        return entry("incomplete", missing, index) if missing else entry("committed", "", index)
    except FileNotFoundError:
        return entry("incomplete", "index.json is missing")
    except CorruptCheckpoint as error:
        return entry("corrupt", str(error).removeprefix(f"{path}/"))
    except OSError as error:
        return entry("unreadable", cannot_read(error), index, error.errno or errno.EIO)
    finally:
        os.close(folder)


def folder_identity(found: os.stat_result) -> str:
    """Tells a folder from another one of its name, and from itself before something in it came, went or was renamed."""
    return f"{found.st_ino} {found.st_ctime_ns}"


def cannot_read(error: OSError) -> str:
    """An OSError in words that blame nobody."""
    return f"can't be read now: {error.strerror or error}"


@contextlib.contextmanager
def reading(where: str | Path) -> Iterator[None]:
    """Any OSError inside becomes a ReadFailed at `where`."""
    try:
        yield
    except ReadFailed:
        raise
    except OSError as error:
        raise read_failed(error, error.filename or where) from error


def read_failed(error: OSError, where: str | Path) -> ReadFailed:
    """The error for whoever asked."""
    if isinstance(error, ReadFailed):
        return error
    descriptors = error.errno in (errno.EMFILE, errno.ENFILE)
    return ReadFailed(
        "can't be read now", where=str(where), seen=error.strerror or str(error), errno=error.errno,
        todo="raise the limit of open files (ulimit -n), or close some" if descriptors
        else "this says nothing about the checkpoints; look at the machine or disk, and ask again",
    )  # fmt: skip


def none_readable(where: Path, seen: str) -> ReadFailed:
    """The error when no checkpoint is known to be good or bad: to say that all are bad would be wrong."""
    return ReadFailed(
        "no checkpoint can be read now", where=str(where), seen=seen,
        todo="this says nothing about them; look at the disk, and ask again",
    )  # fmt: skip


def _is_anothers(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid != os.geteuid()
    except OSError:
        return False


def _missing(folder: int, index: CheckpointIndex) -> str:
    """What a look at names and sizes finds wrong; "" for nothing."""
    for file in files_of(index):
        try:
            seen = os.lstat(file.path, dir_fd=folder)
        except FileNotFoundError:
            return f"{file.path} is missing"
        if not stat.S_ISREG(seen.st_mode):
            return f"{file.path} is not a regular file"
        if seen.st_size != file.bytes:
            return f"{file.path} has {seen.st_size} bytes, wanted {file.bytes}"
    return ""
