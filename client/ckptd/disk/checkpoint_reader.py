"""A checkpoint folder opened for reading: all files first, then bytes that are hashed as they are read.

Nothing is handed out before the whole file it comes from has the committed hash. Files are opened relative to
the open folder, so a rename or deletion during the read changes nothing: either all could be opened, or the
checkpoint is gone. Of a checkpoint of very many files each is opened only while it is read.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Final

from ckptd.disk.cold_read import is_cold, pieces_into
from ckptd.disk.entry import read_failed
from ckptd.disk.folder_files import close_all, open_file, open_folder
from ckptd.disk.head_start import HEAD_BYTES, HeadStart
from ckptd.disk.index_files import refuse_other_step
from ckptd.disk.read_ahead import NotDirect, direct
from ckptd.disk.read_blocks import blocks, fill, read_block
from ckptd.disk.reader import Span
from ckptd.errors import CheckpointGone, CkptdError, CorruptCheckpoint
from ckptd.format.records import CheckpointIndex, read_index
from ckptd.names import META_FILE, TABLE_FILE

#: With more files than this each is opened when it is read: a process has few descriptors, and needs some.
_OPEN_AT_ONCE: Final = 64
#: So many files get a head start at most: 32 MiB of memory, whatever the size of the checkpoint.
_MOST_HEADS: Final = 4


class CheckpointReader:
    """The open files of one checkpoint. A context manager.

    Attributes:
        path: Absolute path of the folder, for messages.
        index: Its index, checked.
    """

    def __init__(self, path: str, *, only: Iterable[str] | None = None) -> None:
        """Open the folder, read its index and open the files of the components asked for.

        Args:
            path: The folder.
            only: Component names; None means all. meta.pt (or ckpt.pt) and tensors.json are always opened.

        Raises:
            CheckpointGone: It isn't there, or was deleted meanwhile.
            CorruptCheckpoint, UnknownSchema: Its index can't be trusted, or a file is missing or of another size.
            ReadFailed: It can't be read now: an I/O error, no permission, no descriptors.
        """
        self.path = os.path.realpath(path)
        self._stack, self._heads = ExitStack(), dict[str, HeadStart]()
        try:
            self._folder = self._open_folder()
            try:
                self.index = read_index(self._folder, where=self.path)
            except FileNotFoundError as error:
                raise self._missing("index.json") from error
            refuse_other_step(self.path, self.index)
            self._fds: dict[str, int] = {}
            self._wanted = _wanted_files(self.index, None if only is None else set(only))
            for name, (size, _) in self._wanted.items():
                # Now, before anybody takes as much memory as the index says.
                self._check_size(name, self._size(name), size)
        except OSError as error:
            self.close()
            raise self._not_read(error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<CheckpointReader {self.path}>"

    def close(self) -> None:
        self._stack.close()
        self._heads.clear()

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that were opened."""
        return tuple(self._wanted)

    def begin(self) -> None:
        """Have the largest shards read and hashed a little way by threads, for `read_into` to go on from there.

        Nothing of it is seen before: it takes at most four times HEAD_BYTES of memory, and `close` waits for the threads.
        """
        if self.index.layout == "single" or not self._fds:
            return  # its file is read at once
        with suppress(OSError):  # it is advice
            for name in (TABLE_FILE, META_FILE):  # are wanted first
                os.posix_fadvise(self._fds[name], 0, 0, os.POSIX_FADV_WILLNEED)
        sizes = sorted((size, name) for name, (size, _) in self._wanted.items() if size > HEAD_BYTES)
        cpus = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) - 1))
        for size, name in sizes[-_most_heads() :]:
            with suppress(OSError, RuntimeError):  # no memory, or no thread: then it is read like the others
                head = HeadStart(self._fds[name], size, cpus)
                self._stack.callback(head.end)  # before: its start may be interrupted
                head.start()
                self._heads[name] = head

    def read(self, name: str) -> bytes:
        """The whole content of a file.

        Raises:
            CorruptCheckpoint: Its size or hash is not the committed one.
        """
        content = bytearray(self._wanted[name][0])
        self.read_into(name, [Span(0, memoryview(content))])
        return bytes(content)

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        """Read and hash a whole file, its spans into their memory; what isn't in a span is only hashed.

        Args:
            name: An open file.
            spans: Ascending, without overlap, inside the file.

        Raises:
            CorruptCheckpoint: Its size or hash is not the committed one; what was read must not be used.
            ReadFailed: It can't be read now; neither must that.
        """
        size, wanted = self._wanted[name]
        with self._reading(name) as fd:
            digest, at, cold = hashlib.sha256(), 0, None
            if (head := self._heads.pop(name, None)) is not None:
                digest, at, spans = head.pour(spans)
                cold = head.cold
            for chunk in _chunks(fd, spans, size, at, cold=is_cold(fd, size) if cold is None else cold):
                digest.update(chunk)
        if digest.hexdigest() != wanted:
            raise CorruptCheckpoint(
                "the sha256 differs from what index.json says",
                where=f"{self.path}/{name}",
                seen=digest.hexdigest(),
                wanted=wanted,
            )

    def peek_into(self, name: str, spans: Sequence[Span]) -> None:
        """Read spans alone, unproven: to decide by; what is kept must be read again by `read_into`.

        Raises:
            CorruptCheckpoint: The file isn't of the committed size.
            ReadFailed: It can't be read now.
        """
        with self._reading(name) as fd:
            for span in spans:
                for _ in fill(fd, span):
                    pass

    def map(self, name: str) -> mmap.mmap:
        """The file in memory, unproven, read where it is looked at; what is written there stays in this process.

        Raises:
            CorruptCheckpoint: Its size is not the committed one.
            ReadFailed: It can't be mapped now.
        """
        with self._reading(name) as fd:
            return mmap.mmap(fd, self._wanted[name][0], mmap.MAP_PRIVATE)

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        """The descriptor of a file of the committed size, with the errors of reading it put into ours."""
        size = self._wanted[name][0]
        try:
            with self._opened(name) as fd:
                if name in self._heads:
                    self._heads[name].wait()
                self._check_size(name, os.fstat(fd).st_size, size)
                try:
                    yield fd
                except EOFError as error:
                    self._check_size(name, os.fstat(fd).st_size, size)
                    raise CorruptCheckpoint("the file ended early", where=f"{self.path}/{name}") from error
        except OSError as error:
            raise self._not_read(error, name) from error

    def _check_size(self, name: str, seen: int, wanted: int) -> None:
        if seen != wanted:
            raise CorruptCheckpoint(
                "the size differs from what index.json says",
                where=f"{self.path}/{name}",
                seen=f"{seen} bytes",
                wanted=f"{wanted}",
            )

    def _open_folder(self) -> int:
        try:
            fd = open_folder(self.path)
        except FileNotFoundError as error:
            raise self._gone() from error
        self._stack.callback(close_all, [fd])
        return fd

    def _size(self, name: str) -> int:
        """The size of a file, which stays open if there are few of them."""
        fd = self._open(name)
        try:
            size = os.fstat(fd).st_size
        except OSError:
            close_all([fd])
            raise
        if len(self._wanted) <= _OPEN_AT_ONCE:
            self._fds[name] = fd
            self._stack.callback(close_all, [fd])
        else:
            close_all([fd])
        return size

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        if name in self._fds:
            yield self._fds[name]
            return
        fd = self._open(name)
        try:
            yield fd
        finally:
            close_all([fd])

    def _open(self, name: str) -> int:
        try:
            return open_file(self._folder, name, f"{self.path}/{name}")
        except FileNotFoundError as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> CorruptCheckpoint | CheckpointGone:
        """A file that isn't there is damage, unless the whole checkpoint is on its way out."""
        try:
            here, there = os.fstat(self._folder), os.stat(self.path)
        except OSError:
            return self._gone()
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            return self._gone()
        return CorruptCheckpoint("a file is missing", where=f"{self.path}/{name}")

    def _gone(self) -> CheckpointGone:
        return CheckpointGone(
            "there is no checkpoint (any more)", where=self.path, todo="ask for the latest again"
        )

    def _not_read(self, error: OSError, name: str = "") -> CkptdError:
        where = os.path.join(self.path, name or error.filename or "")
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return CorruptCheckpoint("a link or a file, not a folder", where=where)
        return read_failed(error, where)


def _chunks(fd: int, spans: Sequence[Span], size: int, at: int, *, cold: bool) -> Iterator[memoryview]:
    """Read a file from `at` on, its spans into their memory; its bytes in their order."""
    if cold:
        with direct(fd) as is_direct:
            if is_direct:
                with suppress(NotDirect):
                    yield from pieces_into(fd, spans, size, at)
                    return
    for block in blocks(spans, size, at):
        yield from read_block(fd, block)


def _most_heads() -> int:
    """More than there are CPUs to hash them would only be in each other's way."""
    return min(len(os.sched_getaffinity(0)), _MOST_HEADS)


def _wanted_files(index: CheckpointIndex, only: set[str] | None) -> dict[str, tuple[int, str]]:
    files = {TABLE_FILE: (index.tensors_bytes, index.tensors_sha256)}
    if index.meta_sha256 is not None and index.meta_bytes is not None:
        files[META_FILE] = (index.meta_bytes, index.meta_sha256)
    for shard in index.shards:
        if only is None or index.layout == "single" or shard.component in only:
            files[shard.path] = (shard.bytes, shard.sha256)
    return files
