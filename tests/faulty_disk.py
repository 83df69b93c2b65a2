"""A disk that fails where a test says, and a commit on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, cast

from ckptd.disk import durable
from ckptd.disk.chunks import Chunk
from ckptd.disk.commit import commit_plan
from ckptd.disk.durable import FsyncFailed
from ckptd.disk.new_file import Steps, Written
from ckptd.disk.series import latest_valid
from ckptd.disk.write_mode import Mode, WriteMode
from ckptd.disk.writing import Writing
from ckptd.format.plan import plan_checkpoint
from snapshots import Writer, data_for, sharded

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
QUOTA = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


class FaultyDisk:
    """durable, with one operation that fails for its first `times` calls, or those on files named `name`."""

    def __init__(self, what: str, error: OSError, *, times: int = 10**9, name: str = "") -> None:
        self._what, self._error, self._times, self._name = what, error, times, name
        self.calls: list[str] = []

    def _do(self, what: str, path: Path, action: Callable[[], Any]) -> Any:
        self.calls.append(f"{what} {path.name}")
        if what == self._what and self._name in path.name and self._times > 0:
            self._times -= 1
            raise self._error
        return action()

    def make_dir_new(self, path: Path) -> None:
        self._do("mkdir", path, lambda: durable.make_dir_new(path))

    def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written:
        written: Written = self._do("write", path, lambda: durable.write_new(path, segments))
        return written

    def write_begun(self, path: Path, segments: Iterable[Chunk]) -> Generator[Written, None, None]:
        def now() -> None:
            self._do("write", path, lambda: None)

        late = isinstance(self._error, FsyncFailed)
        if not late:
            now()
        yield from durable.write_begun(path, segments)
        if late:
            now()

    def write_large(self, path: Path, segments: Iterable[Chunk], writing: Writing) -> Steps:
        self._do("write", path, lambda: None)
        return (yield from durable.write_large(path, segments, writing))

    def fsync_dir(self, path: Path) -> None:
        self._do("sync", path, lambda: durable.fsync_dir(path))

    def rename_new(self, src: Path, dst: Path, *, sync: bool = True) -> None:
        self._do("rename", dst, lambda: durable.rename_new(src, dst, sync=sync))

    def remove_tree(self, path: Path) -> None:
        self._do("remove", path, lambda: durable.remove_tree(path))


def commit_on(
    writer: Writer, disk: FaultyDisk, step: int = 200, make: Any = sharded, writing: Writing | None = None
) -> Any:
    d = make(step)
    plan, position = plan_checkpoint(d), writer.position(d)
    return commit_plan(
        writer.run_dir, d, data_for(step), position, plan, threads=2, writing=writing, disk=disk
    )


#: A small file in the calling thread, and each way of a large one.
WAYS = ("small", "direct", "early", "plain")


def in_way(way: str) -> Writing:
    """Every file is written this way, however small it is; on a file system that has it."""
    if way == "small":
        return Writing()
    return Writing(mode=WriteMode(cast(Mode, way)), large_from_bytes=0)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def latest(writer: Writer) -> str | None:
    found = latest_valid(writer.root, writer.run)
    return found.name if found else None
