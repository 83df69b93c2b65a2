"""The small files of one checkpoint: written one after the other in the calling thread, and then synced in that order.

A sync of a new file waits for the file system's journal. Synced each after its write, three files wait three times;
written first, and on their way to the medium while the next one is made, they wait once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ckptd.disk.chunks import Chunk
from ckptd.disk.data_files import Content, refuse_other_size
from ckptd.disk.new_file import Written
from ckptd.disk.writing import Writing
from ckptd.format.plan import FilePlan


class SmallFileDisk(Protocol):
    """What writes them; `ckptd.disk.durable` is one."""

    def write_begun(self, path: Path, segments: Iterable[Chunk]) -> Generator[Written, None, None]: ...


class SmallFiles:
    """Those of one folder. Left open by nobody: the end of the context closes what was not synced, and removes it.

    Args:
        folder: Of this commit's own.
        data: The snapshot.
        disk: What writes.
        writing: How.
    """

    def __init__(self, folder: Path, data: memoryview, disk: SmallFileDisk, writing: Writing) -> None:
        self._folder, self._data, self._disk, self._writing = folder, data, disk, writing
        self._begun: list[Generator[Written, None, None]] = []

    def __enter__(self) -> SmallFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as closing:
            for file in self._begun:
                closing.callback(file.close)

    def take(self, files: Sequence[FilePlan]) -> bool:
        """Whether these are written here: a single one, and small. Several are written at once, by threads."""
        return len(files) == 1 and files[0].size < self._writing.large_from_bytes

    def write(self, plan: FilePlan) -> Written:
        """Write one, not synced yet.

        Raises:
            OSError, SaveFailed: It may be there in part.
        """
        path = self._folder / plan.path
        self._writing.rate.take(plan.size)
        self._begun.append(self._disk.write_begun(path, Content(plan, self._data)))
        written = next(self._begun[-1])
        refuse_other_size(path, plan, written.bytes)
        return written

    def sync(self) -> None:
        """Sync and close all, in the order in which they were written.

        Raises:
            FsyncFailed: One could not be; those after it weren't tried.
        """
        for file in self._begun:
            for _ in file:
                pass
