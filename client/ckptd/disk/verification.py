"""Proving one checkpoint: every file re-read, every hash compared, every fault said.

The folder and all its files are opened first and read only then: one that is renamed or deleted meanwhile (by
retention, say) is gone, not corrupt. Nothing here changes anything.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ckptd.disk.crew import do_all, in_one_step
from ckptd.disk.entry import read_failed
from ckptd.disk.folder_files import close_all, open_file, open_folder, read_small_file
from ckptd.disk.index_files import IndexedFile, files_of, refuse_other_step
from ckptd.disk.medium import How, forget_cached, hashing
from ckptd.disk.priority import Urgency
from ckptd.disk.verification_v1 import faults_v1
from ckptd.errors import CheckpointGone, CorruptCheckpoint, UnknownSchema
from ckptd.format.records import SCHEMA_V1, CheckpointIndex, read_index
from ckptd.format.table_rows import faults_in_files, table_from_bytes
from ckptd.limits import MAX_TABLE_BYTES
from ckptd.names import INDEX_FILE, SINGLE_FILE, TABLE_FILE

Tell = Callable[[int], None]
Hashing = Generator[None, None, CorruptCheckpoint | None]

_PERHAPS_V1: Final = " (a single file of format v1 is unhashed: try ckptd migrate)"
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
_STRENGTH: Final[dict[How, int]] = {"cached": 0, "dontneed": 1, "direct": 2}


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found.

    Attributes:
        path, name: The folder.
        sequence, index_sha256: From its index; None and "" when that can't be read.
        ok: Every hash was found equal.
        gone: The folder was deleted or renamed before or while it was opened; neither valid nor corrupt.
        faults: All that is wrong with it.
        bytes: Read.
        how: "direct" or "dontneed": from the medium; "cached": perhaps from memory. The weakest of its files.
        stat_signature: Of the folder before it was read.
    """

    path: Path
    name: str
    sequence: int | None
    index_sha256: str
    ok: bool
    gone: bool
    faults: tuple[str, ...]
    bytes: int
    how: str
    stat_signature: str


def check(
    path: str | os.PathLike[str], *, uncached: bool = False, progress: Tell | None = None,
    urgency: Urgency | None = None, at_once: int | None = None,
) -> Report:  # fmt: skip
    """Re-read a checkpoint and report every fault.

    Args:
        path: A checkpoint folder.
        uncached: Read the medium, not the page cache, where that is possible.
        progress: Told the number of bytes after each piece; from several threads, one at a time. What it raises
            ends the check, and is raised.
        urgency: Whether somebody waits for it: else it is done at the lowest priority. Default: somebody does.
        at_once: How many files are read at the same time. Default: as many as there are CPUs.

    Raises:
        ReadFailed: It can't be told: an I/O error, no permission, descriptors or memory. Says nothing about
            the checkpoint. A fault that was found all the same is reported instead.
    """
    return _Check(Path(path), uncached, progress, urgency or Urgency(), at_once).run()


def verify(path: str | os.PathLike[str], *, uncached: bool = False) -> Report:
    """Re-read a checkpoint and raise unless every hash is equal.

    Args:
        path, uncached: As for check.

    Raises:
        CorruptCheckpoint: Something is wrong with it; `seen` and `wanted` are those of the first fault.
        CheckpointGone: It isn't there (any more).
        InvalidArgument, NothingThere: It is something else: a file of a checkpoint, a run, any other folder.
        ReadFailed: As for check.
    """
    from ckptd.disk.wrong_path import refuse_wrong_path  # the verifier, which goes by names, does without

    refuse_wrong_path(path)
    work = _Check(Path(path), uncached, None, Urgency())
    report = work.run()
    if report.gone:
        raise CheckpointGone("the checkpoint is not there", where=str(path), todo="ask for the latest again")
    if work.errors:
        from ckptd.disk.next_valid import instead_of  # which needs this module

        first, more = work.errors[0], len(work.errors) - 1
        what = first.what + (f" (and {more} more faults)" if more else "")
        todo = first.todo or instead_of(path)
        raise type(first)(what, where=first.where, seen=first.seen, wanted=first.wanted, todo=todo)
    return report


def stat_signature(path: str | os.PathLike[str]) -> str:
    """A cheap fingerprint of a folder: names, inodes, sizes, times of its files; "" when there is no folder.

    Two equal ones don't prove anything, and two different ones only cause a re-read.
    """
    try:
        with os.scandir(path) as found:
            rows = sorted((entry.name, entry.stat(follow_symlinks=False)) for entry in found)
    except OSError:
        return ""
    text = "\n".join(f"{name!r} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for name, s in rows)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Check:
    def __init__(
        self, path: Path, uncached: bool, progress: Tell | None, urgency: Urgency, at_once: int | None = None
    ) -> None:
        self.path = path
        self._do = partial(do_all, urgency=urgency, name="ckptd-check", at_once=at_once)
        self.errors: list[CorruptCheckpoint] = []
        self._uncached, self._progress = uncached, progress
        self._index: CheckpointIndex | None = None
        self._unread: OSError | None = None  # why the whole truth can't be told
        self._gone, self._bytes = False, 0
        self._how: How = "direct"
        self._lock = threading.Lock()

    def run(self) -> Report:
        signature = stat_signature(self.path)
        try:
            folder = open_folder(self.path)
        except FileNotFoundError:
            self._gone = True
        except NotADirectoryError:
            self._fault("a link or a file, not a folder" + _PERHAPS_V1, "")
        except OSError as error:
            self._unread = error
        else:
            try:
                self._read(folder)
            finally:
                os.close(folder)
        if self._gone:
            self.errors.clear()
        elif self._unread is not None and not self.errors:
            where = os.path.join(self.path, self._unread.filename or "")
            raise read_failed(self._unread, where) from self._unread
        index = self._index
        return Report(
            path=self.path, name=self.path.name, sequence=index.sequence if index else None,
            index_sha256=index.index_sha256 if index else "",
            ok=not self.errors and not self._gone, gone=self._gone,
            faults=tuple(self._in_words(error) for error in self.errors), bytes=self._bytes,
            how=self._how if self._bytes else "cached", stat_signature=signature,
        )  # fmt: skip

    def _read(self, folder: int) -> None:
        try:
            (index,) = (self._index,) = self._do([in_one_step(lambda: self._read_index(folder))])
            if index is not None:
                self._check_name(index)
                self._open_and_hash(folder, files_of(index))
                if not self.errors and not self._gone and self._unread is None:
                    self._do([in_one_step(lambda: self._check_table(folder, index))])
        except OSError as error:
            self._unread = error
        if (self.errors or self._unread) and not self._still_there(folder):
            self._gone = True

    def _read_index(self, folder: int) -> CheckpointIndex | None:
        try:
            if self._uncached:
                forget_cached(folder, INDEX_FILE)
            return read_index(folder, where=str(self.path))
        except FileNotFoundError:
            # A single file of format v1 has neither; what it is, only torch could tell.
            v1 = {SINGLE_FILE} == {SINGLE_FILE, TABLE_FILE} & set(os.listdir(folder))
            self._fault("is missing" + (_PERHAPS_V1 if v1 else ""), INDEX_FILE)
        except UnknownSchema as error:
            if error.seen == repr(SCHEMA_V1):
                self.errors += faults_v1(folder, self.path, uncached=self._uncached)
            else:
                self.errors.append(error)
        except CorruptCheckpoint as error:
            self.errors.append(error)
        return None

    def _check_name(self, index: CheckpointIndex) -> None:
        try:
            refuse_other_step(str(self.path), index)
        except CorruptCheckpoint as error:
            self.errors.append(error)

    def _open_and_hash(self, folder: int, expected: list[IndexedFile]) -> None:
        """Open all before the first is read; those no descriptors are left for, one by one at the end."""
        opened: dict[str, int] = {}
        late: list[IndexedFile] = []
        try:
            for file in expected:
                try:
                    self._open(folder, file.path, opened)
                except OSError as error:
                    if error.errno not in _NO_DESCRIPTORS:
                        raise
                    late.append(file)
            if len(opened) + len(late) < len(expected) and not self._still_there(folder):
                self._gone = True
                return
            self._take(self._do([self._hash(opened, file) for file in expected if file.path in opened]))
            for file in late:
                if self._open(folder, file.path, opened):
                    self._take(self._do([self._hash(opened, file)]))
        finally:
            close_all(opened.values())

    def _open(self, folder: int, name: str, opened: dict[str, int]) -> bool:
        """Add a descriptor to opened, or say why there is none."""
        try:
            opened[name] = open_file(folder, name, str(self.path / name))
        except CorruptCheckpoint as error:
            self.errors.append(error)
        except FileNotFoundError:
            self._fault("is missing", name)
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                raise
            self._unread = error
        return name in opened

    def _take(self, errors: Iterable[CorruptCheckpoint | None]) -> None:
        self.errors += [error for error in errors if error is not None]

    def _hash(self, opened: dict[str, int], file: IndexedFile) -> Hashing:
        fd = opened[file.path]
        try:
            return (yield from self._compare(fd, file))
        except OSError as error:
            self._unread = error
            return None
        finally:
            os.close(opened.pop(file.path))

    def _compare(self, fd: int, file: IndexedFile) -> Hashing:
        where = str(self.path / file.path)
        size = os.fstat(fd).st_size
        if size != file.bytes:
            return CorruptCheckpoint("wrong size", where=where, seen=f"{size} bytes", wanted=f"{file.bytes}")
        sha256, count, how = yield from hashing(fd, uncached=self._uncached, progress=self._tell)
        with self._lock:
            self._bytes += count
            self._how = min(self._how, how, key=_STRENGTH.__getitem__)
        if sha256 != file.sha256:
            return CorruptCheckpoint("wrong sha256", where=where, seen=sha256, wanted=file.sha256)
        return None

    def _check_table(self, folder: int, index: CheckpointIndex) -> None:
        """Look once more whether the table, whose bytes are those that were committed, makes sense."""
        where = str(self.path / TABLE_FILE)
        try:
            data = read_small_file(folder, TABLE_FILE, where, MAX_TABLE_BYTES)
            rows = table_from_bytes(data, where)
        except CorruptCheckpoint as error:
            self.errors.append(error)
        except FileNotFoundError:
            self._fault("is missing", TABLE_FILE)
        else:
            for fault in faults_in_files(rows, {file.path: file.bytes for file in files_of(index)}):
                self._fault(fault, TABLE_FILE)

    def _still_there(self, folder: int) -> bool:
        """Whether the open folder still has the name it was opened by."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(folder))
        except FileNotFoundError:
            return False
        except OSError:
            return True  # nothing says that it isn't

    def _tell(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(count)

    def _fault(self, what: str, name: str, *, seen: str = "", wanted: str = "") -> None:
        where = str(self.path / name)
        self.errors.append(CorruptCheckpoint(what, where=where, seen=seen, wanted=wanted))

    def _in_words(self, error: CorruptCheckpoint) -> str:
        return str(error).removeprefix(f"{self.path}/").removeprefix(f"{self.path}: ")
