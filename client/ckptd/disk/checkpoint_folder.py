"""Writing one checkpoint folder under its temporary name: data files, the table, then the index.

Large or several data files are written in parallel, each synced by whoever writes it; what is small is written in this
thread, and synced when all of it is.

The order is that of `ckptd.disk.commit`, which gives the folder its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from ckptd.disk import durable
from ckptd.disk.data_files import FileDisk, write_files
from ckptd.disk.lineage import Position
from ckptd.disk.new_file import Written
from ckptd.disk.small_files import SmallFileDisk, SmallFiles
from ckptd.disk.writing import Writing
from ckptd.errors import CorruptCheckpoint, SaveFailed
from ckptd.format.plan import CheckpointPlan, FilePlan
from ckptd.format.records import CheckpointIndex, ShardRecord, index_from_bytes, index_to_bytes
from ckptd.names import INDEX_FILE, META_FILE, TABLE_FILE
from ckptd.snapshot.descriptor import Descriptor

#: Raises when what was written is not what should have been.
Check: TypeAlias = Callable[[], None]


class Disk(FileDisk, SmallFileDisk, Protocol):
    """What a commit does to a disk; `ckptd.disk.durable` is one."""

    def make_dir_new(self, path: Path) -> None: ...
    def fsync_dir(self, path: Path) -> None: ...
    def rename_new(self, src: Path, dst: Path, *, sync: bool = True) -> None: ...
    def remove_tree(self, path: Path) -> None: ...


def write_folder(
    temp: Path, descriptor: Descriptor, data: memoryview, position: Position, plan: CheckpointPlan, *,
    threads: int | None, writing: Writing, disk: Disk, check: Check = lambda: None,
) -> CheckpointIndex:  # fmt: skip
    """Write the whole checkpoint into the new folder temp and make it durable under that name.

    Raises:
        OSError, SaveFailed: temp may be there in part; the caller removes it.
    """
    durable.crash_point("before-temp")
    disk.make_dir_new(temp)
    durable.crash_point("after-temp")
    with SmallFiles(temp, data, disk, writing) as small:

        def write(files: Sequence[FilePlan]) -> list[Written]:
            if small.take(files):
                return [small.write(file) for file in files]
            return write_files(temp, files, data, disk=disk, writing=writing, threads=threads)

        written, (table,) = write(plan.files), write([_literal(TABLE_FILE, plan.table)])
        check()
        durable.crash_point("before-index")
        record, where = _index(descriptor, position, plan, written, table), str(temp / INDEX_FILE)
        with _refused(where):
            data_of_index = index_to_bytes(record)
        small.write(_literal(INDEX_FILE, data_of_index))
        with _refused(where):  # while all of it is on its way to the medium
            index = index_from_bytes(data_of_index, where)
        small.sync()
    durable.crash_point("after-index")
    disk.fsync_dir(temp)
    durable.crash_point("after-folder-sync")
    return index


def _literal(path: str, data: bytes) -> FilePlan:
    return FilePlan(path=path, component="", shard=0, num_params=0, size=len(data), segments=(data,))


@contextlib.contextmanager
def _refused(where: str) -> Iterator[None]:
    """Surrounds the making of an index, and its reading: what a reader would refuse must not be committed."""
    try:
        yield
    except CorruptCheckpoint as error:
        raise SaveFailed(
            "its index would be refused", where=error.where, seen=f"{error.what} {error.seen}"
        ) from error
    except (ValueError, TypeError) as error:
        raise SaveFailed("its index can't be written", where=where, seen=str(error)) from error


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
