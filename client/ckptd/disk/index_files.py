"""The files that an index names, each with its size and hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from ckptd.errors import CorruptCheckpoint
from ckptd.format.records import CheckpointIndex
from ckptd.names import INDEX_FILE, META_FILE, TABLE_FILE, parse_step_folder


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file as the index states it: SHA-256 in hex."""

    path: str
    bytes: int
    sha256: str


def refuse_other_step(folder: str, index: CheckpointIndex) -> None:
    """A folder named for a step holds that one, not a whole copy of another.

    Raises:
        CorruptCheckpoint: The index is that of another step.
    """
    named = parse_step_folder(PurePath(folder).name)
    if named is not None and named[0] != index.step:
        raise CorruptCheckpoint(
            "the folder's name has another step", where=f"{folder}/{INDEX_FILE}",
            seen=str(index.step), wanted=str(named[0]),
        )  # fmt: skip


def files_of(index: CheckpointIndex) -> list[IndexedFile]:
    """Every file of the checkpoint but the index itself; meta.pt first, tensors.json last."""
    files = [IndexedFile(shard.path, shard.bytes, shard.sha256) for shard in index.shards]
    files.append(IndexedFile(TABLE_FILE, index.tensors_bytes, index.tensors_sha256))
    if index.meta_sha256 is not None and index.meta_bytes is not None:
        files.insert(0, IndexedFile(META_FILE, index.meta_bytes, index.meta_sha256))
    return files
