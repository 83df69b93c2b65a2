"""What the hardware can do with the same bytes, bare: no format, no index, and no hash but where it is one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import page_cache
import torch

CORES: Final = len(os.sched_getaffinity(0))

_CHUNK: Final = 4 << 20
_DIRECT_CHUNK: Final = 16 << 20
_PAGE: Final = 4096
_WRITE_SOON: Final = 2  # SYNC_FILE_RANGE_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

Write = Callable[[int, memoryview], None]


class Floor:
    """A floor, as a contestant: `work` once, `tidy` not timed."""

    ours = True  # these can't fail for a reason of their own

    def __init__(self, name: str, about: str, work: Callable[[], object], tidy: Callable[[], None]) -> None:
        self.name, self.about, self._work, self._tidy = name, about, work, tidy

    def measure(self) -> dict[str, float]:
        """Seconds, as "done"."""
        began = time.perf_counter()
        self._work()
        return {"done": time.perf_counter() - began}

    def settle(self) -> None:
        """Tidy up."""
        self._tidy()

    def close(self) -> None:
        """Nothing is held."""


def random_bytes(count: int) -> mmap.mmap:
    """So many bytes on whole pages, rounded up, touched; direct writes need that. Huge ones where there are any."""
    length = -(-max(count, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).random_(0, 256)
    return memory


# --- memory and hash ------------------------------------------------------------------------------


def flat_copies(nbytes: int) -> list[Floor]:
    """One copy_ of one flat tensor into touched memory, with one thread; and the very same again."""
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.ones_like(source)

    def work() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        target.copy_(source)
        torch.set_num_threads(threads)

    about = "1 thread, into memory that is touched already"
    return [
        Floor("flat copy_", about, work, lambda: None),
        Floor("control: flat copy_, again", "the same", work, lambda: None),
    ]


def sha256(data: mmap.mmap) -> Floor:
    """SHA-256 of the bytes, one piece per core."""
    pieces = _pieces(memoryview(data), CORES)

    def work() -> None:
        with ThreadPoolExecutor(CORES) as pool:
            list(pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces))

    return Floor("SHA-256, all cores", f"{CORES} threads over {CORES} pieces", work, lambda: None)


# --- writing --------------------------------------------------------------------------------------


def raw_writes(folder: Path, data: mmap.mmap) -> list[Floor]:
    """Every way to get the bytes on disk; each ends with fsync, rename and the sync of the folder."""
    end = "fsync, rename, fsync of the folder"
    return [
        _raw_write("raw write, buffered", f"1 thread; {end}", folder, data, 1, 0, _buffered),
        _raw_write("raw write, sync_file_range", f"1 thread; {end}", folder, data, 1, 0, _ranged),
        _raw_write("raw write, O_DIRECT", f"1 thread, 16 MiB blocks; {end}", folder, data, 1, os.O_DIRECT, _direct),
        _raw_write(
            "raw write, O_DIRECT, all cores", f"{CORES} threads, a file each; {end}",
            folder, data, CORES, os.O_DIRECT, _direct,
        ),
    ]  # fmt: skip


def raw_write_again(folder: Path, data: mmap.mmap) -> Floor:
    """The first of raw_writes once more: how far two equal things differ here."""
    again = raw_writes(folder, data)[0]
    again.name, again.about = "control: raw write, buffered, again", "the same"
    return again


def _raw_write(
    name: str, about: str, folder: Path, data: mmap.mmap, files: int, flags: int, write: Write
) -> Floor:  # fmt: skip
    pieces = _pieces(memoryview(data), files)
    temps = [folder / f"raw-{number}.tmp" for number in range(len(pieces))]

    def one(path: Path, piece: memoryview) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        try:
            write(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)

    def work() -> None:
        if len(pieces) == 1:
            one(temps[0], pieces[0])
        else:
            with ThreadPoolExecutor(len(pieces)) as pool:
                list(pool.map(one, temps, pieces))
        for temp in temps:
            temp.rename(temp.with_suffix(".raw"))
        sync_folder(folder)

    def tidy() -> None:
        for temp in temps:
            temp.with_suffix(".raw").unlink(missing_ok=True)
        page_cache.sync_file_system(folder)

    return Floor(name, about, work, tidy)


def _buffered(fd: int, data: memoryview) -> None:
    for at in range(0, len(data), _CHUNK):
        _whole(fd, data[at : at + _CHUNK], at)


def _ranged(fd: int, data: memoryview) -> None:
    for at in range(0, len(data), _CHUNK):
        _whole(fd, data[at : at + _CHUNK], at)
        _libc.sync_file_range(fd, at, _CHUNK, _WRITE_SOON)


def _direct(fd: int, data: memoryview) -> None:
    for at in range(0, len(data), _DIRECT_CHUNK):
        _whole(fd, data[at : at + _DIRECT_CHUNK], at)


def _whole(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)


def sync_folder(folder: Path) -> None:
    """Have the names in it durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- reading --------------------------------------------------------------------------------------


def raw_reads(folder: Path, data: mmap.mmap) -> list[Floor]:
    """Every way to get the bytes from the medium; the file is in no cache before."""
    path = folder / "raw-read.raw"
    path.write_bytes(data)
    page_cache.drop([path])
    targets = [random_bytes(len(piece)) for piece in _pieces(memoryview(data), CORES)]
    whole = random_bytes(len(data))

    def reader(fd: int, target: mmap.mmap, at: int) -> None:
        view, done = memoryview(target), 0
        while done < len(view):
            wanted = view[done : done + _DIRECT_CHUNK]
            done += os.preadv(fd, [wanted], at + done)

    def read(flags: int, into: list[mmap.mmap]) -> None:
        fd = os.open(path, os.O_RDONLY | flags)
        try:
            starts = [sum(len(one) for one in into[:number]) for number in range(len(into))]
            with ThreadPoolExecutor(len(into)) as pool:
                list(pool.map(reader, [fd] * len(into), into, starts))
        finally:
            os.close(fd)

    tidy = lambda: page_cache.drop([path])  # noqa: E731
    direct = f"{CORES} threads, 16 MiB blocks"
    return [
        Floor("raw read, O_DIRECT", "1 thread, 16 MiB blocks", lambda: read(os.O_DIRECT, [whole]), tidy),
        Floor("raw read, O_DIRECT, all cores", direct, lambda: read(os.O_DIRECT, targets), tidy),
        Floor(
            "raw read, buffered, all cores", f"{direct}; cache dropped before", lambda: read(0, targets), tidy
        ),
    ]


def _pieces(data: memoryview, count: int) -> list[memoryview]:
    """As many pieces of whole pages, as equal as can be; fewer when there aren't so many pages."""
    pages = len(data) // _PAGE
    ends = [pages * (number + 1) // count * _PAGE for number in range(count)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]
