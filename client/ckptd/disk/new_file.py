"""The bytes of a new file on their way to the medium: a large one block by block, in the mode of its root.

Whoever asks for the next step may be another thread each time. Between two steps nothing is under way, and a file
that is given up in the middle is removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ckptd.disk.chunks import Chunk, even_chunks
from ckptd.disk.direct_blocks import DirectBlocks
from ckptd.disk.own_leftovers import unlink_quietly
from ckptd.disk.write_mode import UNSUPPORTED, Mode, Refused, set_direct, start_writing
from ckptd.disk.write_rate import WriteRate
from ckptd.disk.writing import Writing
from ckptd.limits import PAGE_ALIGNMENT

#: Gives the number of bytes at its end.
Steps: TypeAlias = Generator[None, None, int]
#: Makes an open file's bytes durable, or raises.
Sync: TypeAlias = Callable[[int, Path], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What was written to a file: its length and the SHA-256 (hex) of the bytes handed in."""

    bytes: int
    sha256: str


def create(path: Path) -> int:
    """Open a file for writing under a name that nothing has, not even a dangling link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def created(path: Path) -> Iterator[int]:
    """The same, closed at the end, and removed again after an error."""
    fd = create(path)
    try:
        try:
            yield fd
        finally:
            os.close(fd)
    except BaseException:
        unlink_quietly(path)
        raise


def write_all(fd: int, data: Chunk) -> int:
    """Write all of it at the file's position; returns its length."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]  # may be short: a signal, a quota, 2 GiB at most
    return memoryview(data).nbytes


def write_and_hash(fd: int, segments: Iterable[Chunk]) -> Written:
    """Write all segments at the file's position."""
    count, digest = 0, hashlib.sha256()
    for chunk in even_chunks(segments):
        digest.update(chunk)
        count += write_all(fd, chunk)
    return Written(count, digest.hexdigest())


def write_steps(path: Path, segments: Iterable[Chunk], writing: Writing, sync: Sync) -> Steps:
    """Create path, which must not exist, write the segments, sync and close it, a block with each step.

    A file system that refuses a mode only now has the file begun anew in the next one: the segments are gone through
    again.

    Raises:
        OSError: As for ckptd.disk.durable.write_new. What was written of the file is removed again.
    """
    mode = writing.mode.now
    while True:
        try:
            return (yield from _write_in(mode, path, segments, writing.rate, sync))
        except Refused as refused:
            mode = writing.mode.refused(mode, str(refused))


def _write_in(mode: Mode, path: Path, segments: Iterable[Chunk], rate: WriteRate, sync: Sync) -> Steps:
    with created(path) as fd:
        if mode == "direct":
            nbytes = yield from _direct(fd, segments, rate)
        else:
            nbytes = yield from _buffered(fd, segments, rate, early=mode == "early")
        sync(fd, path)
    return nbytes


def _direct(fd: int, segments: Iterable[Chunk], rate: WriteRate) -> Steps:
    with _refusals():
        set_direct(fd)
    blocks, at = DirectBlocks(segments, rate.block_bytes), 0
    for block in blocks:
        length = sum(map(len, block))
        rate.take(length)
        _pwrite_all(fd, block, at)
        at += length
        yield
    if at != blocks.nbytes:
        os.ftruncate(fd, blocks.nbytes)  # the last page was filled up
    return blocks.nbytes


def _pwrite_all(fd: int, parts: Sequence[memoryview], at: int) -> None:
    """Write whole pages; after a short write what is left, from the last whole page on."""
    left = list(parts)
    while left:
        with _refusals():
            done = os.pwritev(fd, left, at)
        done = done // PAGE_ALIGNMENT * PAGE_ALIGNMENT
        if done == 0:
            raise Refused("less than a page was written")
        at += done
        left = list(_behind(left, done))


def _behind(parts: Iterable[memoryview], count: int) -> Iterator[memoryview]:
    """What comes after the first `count` bytes."""
    for part in parts:
        if count < len(part):
            yield part[count:]
        count = max(0, count - len(part))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        raise Refused(f"{errno.errorcode[error.errno]} from a write") from error


def _buffered(fd: int, segments: Iterable[Chunk], rate: WriteRate, *, early: bool) -> Steps:
    at = 0
    for chunk in even_chunks(segments, rate.block_bytes):
        rate.take(len(chunk))
        write_all(fd, chunk)
        if early:
            early = sent_off(fd, at, len(chunk))
        at += len(chunk)
        yield
    return at


def sent_off(fd: int, offset: int, nbytes: int) -> bool:
    """Have these bytes (0: all behind the offset) sent on their way; False when that can't be had, which loses nothing.

    Raises:
        OSError: They can't be written back; a sync of the file may not say so again.
    """
    try:
        start_writing(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True
