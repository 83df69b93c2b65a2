"""The data files of one checkpoint: several written at once and hashed beside, straight from the snapshot.

Every file is hashed in another thread than the one that writes it, so that with O_DIRECT the CPU's part hides
behind the device's. One stream can't be hashed by two threads: with `shards="auto"` there are as many files as
CPUs. Small files take no threads, no mode and no second look at their bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ckptd.disk import durable
from ckptd.disk.chunks import Chunk, hash_steps
from ckptd.disk.crew import Crew, Job, Lane
from ckptd.disk.durable import FsyncFailed
from ckptd.disk.new_file import Steps, Written
from ckptd.disk.writing import Writing
from ckptd.errors import SaveFailed
from ckptd.format.plan import FilePlan, SlotRange


class FileDisk(Protocol):
    """What writes new files; `ckptd.disk.durable` is one."""

    def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written: ...
    def write_large(self, path: Path, segments: Iterable[Chunk], writing: Writing) -> Steps: ...


def write_files(
    folder: Path, files: Sequence[FilePlan], data: memoryview, *,
    disk: FileDisk, writing: Writing, threads: int | None,
) -> list[Written]:  # fmt: skip
    """Write and sync the planned files in a folder of this commit's own; what came of each, in their order.

    Args:
        folder: Removed by the caller should this raise; the mode is tried out in it.
        files: Their plans.
        data: The snapshot; not read any more once this returns or raises.
        disk: What writes them.
        writing: How.
        threads: Files written at once, and hashed at once; 1 for none but the calling thread.

    Raises:
        OSError, SaveFailed: Of several, a failed sync only when it is alone: it is worth another try.
    """
    written = [_DataFile(folder / file.path, file, data, disk, writing) for file in files]
    if any(each.large for each in written):
        writing.mode.find_out(folder)
    # the largest first: the last one to end decides how long it takes
    order = sorted(written, key=lambda each: -each.plan.size)
    writes, hashes = [each.write for each in order], [each.hash for each in order if each.hash is not None]
    if threads == 1:
        _one_by_one([*writes, *hashes])
    else:
        lanes = [Lane(writes, writing.writers(threads)), Lane(hashes, writing.hashers(threads))]
        Crew(lanes, writing.urgency, name="ckptd-write", stops=_stops).do()
    errors = [job.error for job in (*writes, *hashes) if job.error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, FsyncFailed))
    return [each.written() for each in written]


def _stops(error: BaseException) -> bool:
    """A failed sync doesn't keep the others from saying that they failed for good."""
    return not isinstance(error, FsyncFailed)


def _one_by_one(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.go_on(lambda: True)
        if job.error is not None and _stops(job.error):
            return


def refuse_other_size(path: Path, plan: FilePlan, nbytes: int) -> None:
    """A data file was written; raise SaveFailed if it isn't as long as it was planned."""
    durable.crash_point("after-file")
    if nbytes != plan.size:
        raise SaveFailed(
            "a file has not the planned size", where=str(path), seen=f"{nbytes} bytes", wanted=f"{plan.size}"
        )


class Content:
    """A planned file as segments, looked up in the snapshot one by one; may be gone through again."""

    def __init__(self, file: FilePlan, data: memoryview) -> None:
        self._segments, self._data = file.segments, data

    def __iter__(self) -> Iterator[Chunk]:
        for segment in self._segments:
            if isinstance(segment, SlotRange):
                yield self._data[segment.offset : segment.offset + segment.nbytes]
            else:
                yield segment


class _DataFile:
    """One file on its way: the job that writes it, and the one that hashes it when it is large."""

    def __init__(
        self, path: Path, plan: FilePlan, data: memoryview, disk: FileDisk, writing: Writing
    ) -> None:
        self.plan, self.large = plan, plan.size >= writing.large_from_bytes
        self._path, self._content, self._disk, self._writing = path, Content(plan, data), disk, writing
        self.write = Job(self._write_large() if self.large else self._write_small())
        self.hash = Job(hash_steps(self._content)) if self.large else None

    def written(self) -> Written:
        """Length and hash, once both jobs are done."""
        written = self.write.result
        return written if self.hash is None else Written(written, self.hash.result)

    def _write_small(self) -> Generator[None, None, Written]:
        self._writing.rate.take(self.plan.size)
        written = self._disk.write_new(self._path, self._content)
        refuse_other_size(self._path, self.plan, written.bytes)
        return written
        yield

    def _write_large(self) -> Steps:
        nbytes = yield from self._disk.write_large(self._path, self._content, self._writing)
        refuse_other_size(self._path, self.plan, nbytes)
        return nbytes
