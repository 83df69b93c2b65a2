"""Writing one checkpoint folder under its temporary name: data files in parallel, the table, then the index.

The order is that of `ckptd.disk.commit`, which gives the folder its name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ckptd.disk import durable
from ckptd.disk.chunks import Chunk
from ckptd.disk.durable import Written
from ckptd.disk.lineage import Position
from ckptd.errors import CorruptCheckpoint, SaveFailed
from ckptd.format.plan import CheckpointPlan, FilePlan, SlotRange
from ckptd.format.records import CheckpointIndex, ShardRecord, index_from_bytes, index_to_bytes
from ckptd.names import INDEX_FILE, META_FILE, TABLE_FILE
from ckptd.snapshot.descriptor import Descriptor


class Disk(Protocol):
    """What a commit does to a disk; `ckptd.disk.durable` is one."""

    def make_dir_new(self, path: Path) -> None: ...
    def write_new(self, path: Path, segments: Iterable[Chunk]) -> Written: ...
    def fsync_dir(self, path: Path) -> None: ...
    def rename_new(self, src: Path, dst: Path, *, sync: bool = True) -> None: ...
    def remove_tree(self, path: Path) -> None: ...


def write_folder(
    temp: Path, descriptor: Descriptor, data: memoryview, position: Position, plan: CheckpointPlan, *,
    threads: int | None, disk: Disk,
) -> CheckpointIndex:  # fmt: skip
    """Write the whole checkpoint into the new folder temp and make it durable under that name.

    Raises:
        OSError, SaveFailed: temp may be there in part; the caller removes it.
    """
    durable.crash_point("before-temp")
    disk.make_dir_new(temp)
    durable.crash_point("after-temp")
    written = _write_files(temp, plan.files, data, disk, threads or len(os.sched_getaffinity(0)))
    table = disk.write_new(temp / TABLE_FILE, [plan.table])
    durable.crash_point("before-index")
    data_of_index, index = _readable(_index(descriptor, position, plan, written, table), temp)
    disk.write_new(temp / INDEX_FILE, [data_of_index])
    durable.crash_point("after-index")
    disk.fsync_dir(temp)
    durable.crash_point("after-folder-sync")
    return index


def _readable(index: CheckpointIndex, temp: Path) -> tuple[bytes, CheckpointIndex]:
    """The index's bytes, and what a reader makes of them: what it would refuse must not be committed."""
    where = str(temp / INDEX_FILE)
    try:
        data = index_to_bytes(index)
        return data, index_from_bytes(data, where)
    except CorruptCheckpoint as error:
        raise SaveFailed(
            "its index would be refused", where=error.where, seen=f"{error.what} {error.seen}"
        ) from error
    except (ValueError, TypeError) as error:
        raise SaveFailed("its index can't be written", where=where, seen=str(error)) from error


class _Content:
    """A planned file as segments, looked up in the snapshot one by one; may be gone through again."""

    def __init__(self, file: FilePlan, data: memoryview, stop: threading.Event) -> None:
        self._segments, self._data, self._stop = file.segments, data, stop

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, _segment: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Chunk]:
        for segment in self._segments:
            if self._stop.is_set():
                return  # another file failed; this one would be written for nothing
            if isinstance(segment, SlotRange):
                yield self._data[segment.offset : segment.offset + segment.nbytes]
            else:
                yield segment


def _write_files(
    temp: Path, files: Sequence[FilePlan], data: memoryview, disk: Disk, threads: int
) -> list[Written]:
    stop = threading.Event()

    def write(file: FilePlan) -> Written:
        try:
            written = disk.write_new(temp / file.path, _Content(file, data, stop))
        except BaseException:
            stop.set()
            raise
        durable.crash_point("after-file")
        if written.bytes != file.size and not stop.is_set():
            raise SaveFailed(
                "a file has not the planned size", where=str(temp / file.path),
                seen=f"{written.bytes} bytes", wanted=f"{file.size}",
            )  # fmt: skip
        return written

    if len(files) == 1 or threads == 1:
        return [write(file) for file in files]
    with ThreadPoolExecutor(min(threads, len(files)), thread_name_prefix="ckptd-write") as pool:
        # the largest first: the last one to end decides how long it takes
        order = sorted(range(len(files)), key=lambda at: -files[at].size)
        futures = {at: pool.submit(write, files[at]) for at in order}
    return _results(futures[at].exception() or futures[at].result() for at in range(len(files)))


def _results(outcomes: Iterable[Written | BaseException]) -> list[Written]:
    """All results, or the worst error: a failed sync is tried again, so it counts only when it is alone."""
    written: list[Written] = []
    errors: list[BaseException] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            errors.append(outcome)
        else:
            written.append(outcome)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, durable.FsyncFailed))
    return written


def _index(
    d: Descriptor, position: Position, plan: CheckpointPlan, written: Sequence[Written], table: Written
) -> CheckpointIndex:
    by_path = dict(zip((file.path for file in plan.files), written, strict=True))
    meta = by_path.get(META_FILE)
    shards = tuple(
        ShardRecord(
            shard=file.shard, component=file.component, path=file.path, bytes=by_path[file.path].bytes,
            sha256=by_path[file.path].sha256, num_params=file.num_params,
        )
        for file in plan.files
        if file.path != META_FILE
    )  # fmt: skip
    return CheckpointIndex(
        run=d.run, run_id=position.run_id, client_id=d.client_id, snapshot=d.snapshot,
        sequence=position.sequence, parent=position.parent, step=d.step, saved_at=float(d.saved_at),
        lineage=position.lineage, run_seconds=float(d.run_seconds),
        layout=plan.layout, num_shards=len(shards), shards=shards,
        meta_sha256=meta.sha256 if meta else None, meta_bytes=meta.bytes if meta else None,
        tensors_sha256=table.sha256, tensors_bytes=table.bytes,
        metrics={name: float(value) for name, value in d.metrics.items()}, versions=d.versions,
    )  # fmt: skip
