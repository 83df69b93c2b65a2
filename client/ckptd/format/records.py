"""index.json of a checkpoint: the record that proves it, and its strict reading.

The bytes of the file must be the canonical form of what they say, and carry the hash of the rest, so that any
changed byte shows. Reading is pure: bytes in, values out, or an error that says what is wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.errors import CorruptCheckpoint, UnknownSchema
from ckptd.format.fields import Fields
from ckptd.format.strict_json import canonical, float_from_json, float_to_json, parse
from ckptd.format.table_rows import TensorRow, table_from_bytes
from ckptd.limits import MAX_INDEX_BYTES, MAX_METRICS, MAX_NAME_BYTES, MAX_SHARDS, MAX_STEP
from ckptd.names import INDEX_FILE, META_FILE, SINGLE_FILE, check_run_name, shard_file

__all__ = [
    "SCHEMA", "SCHEMA_V1", "CheckpointIndex", "ShardRecord", "TensorRow",
    "index_from_bytes", "index_to_bytes", "read_index", "table_from_bytes",
]  # fmt: skip

SCHEMA: Final = "ckpt.v2-index"
SCHEMA_V1: Final = "ckpt.v1-index"

Layout = Literal["single", "sharded"]
Lineage = tuple[tuple[int, int], ...]

#: Follows the line of index_sha256; no field that holds others comes before it.
_AFTER_HASH: Final = b'  "layout": '
_SHARD_PATH: Final = re.compile(r"[a-z0-9_]{1,32}\.shard-[0-9]{3,6}\.pt", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One data file: which part of which component it holds, its size and its SHA-256 (hex)."""

    shard: int
    component: str
    path: str
    bytes: int
    sha256: str
    num_params: int
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIndex:
    """What a checkpoint says of itself.

    Attributes:
        run: Run name it was committed under. Information: a run folder may be renamed; run_id counts.
        run_id: 32 hex digits, the run's from its birth on.
        client_id: The client that took the snapshot; with `snapshot` it names the snapshot for ever.
        snapshot: Its number at that client, from 1.
        sequence: The run's commit counter; it orders checkpoints.
        parent: Sequence of the checkpoint training went on from; None for the first.
        step: Finished optimizer steps.
        saved_at: Unix seconds at capture. Information only.
        lineage: Closed, ascending ranges of the sequences on its line, itself the last.
        run_seconds: Training seconds accumulated over all restarts.
        layout: "single" (ckpt.pt) or "sharded" (meta.pt and shards).
        num_shards: len(shards).
        shards: The data files; in the single layout ckpt.pt is the one, with component "ckpt".
        meta_sha256: Of meta.pt; None in the single layout.
        meta_bytes: Its size; None in the single layout.
        tensors_sha256: Of tensors.json.
        tensors_bytes: Its size.
        world_size: Processes that wrote it; 1 today.
        metrics: By name, NaN and infinities too.
        tags: Names given at commit; today none.
        versions: {"ckptd": …, "torch": …, "numpy": …, "python": …}
        index_sha256: Of the canonical index without this field; "" before it is filled.
    """

    run: str
    run_id: str
    client_id: str
    snapshot: int
    sequence: int
    parent: int | None
    step: int
    saved_at: float
    lineage: Lineage
    run_seconds: float
    layout: Layout
    num_shards: int
    shards: tuple[ShardRecord, ...]
    meta_sha256: str | None
    meta_bytes: int | None
    tensors_sha256: str
    tensors_bytes: int
    world_size: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    index_sha256: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files but the index itself."""
        return sum(shard.bytes for shard in self.shards) + (self.meta_bytes or 0) + self.tensors_bytes


def index_to_bytes(index: CheckpointIndex) -> bytes:
    """The file's bytes, index_sha256 filled in."""
    data = canonical(_to_json(index))
    line = _hash_line(hashlib.sha256(data).hexdigest())
    return data.replace(_AFTER_HASH, line + _AFTER_HASH, 1)


def index_from_bytes(data: bytes, where: str) -> CheckpointIndex:
    """Read and check the bytes of an index.json.

    Args:
        data: The whole file.
        where: Its path, for the error.

    Raises:
        UnknownSchema: It is of another version; `seen` is its schema string.
        CorruptCheckpoint: Not one unchanged, complete, canonical index.
    """
    obj = parse(data, where=where, max_bytes=MAX_INDEX_BYTES)
    if isinstance(obj, dict) and obj.get("schema") != SCHEMA:
        raise UnknownSchema(
            "unknown schema",
            where=where,
            seen=repr(obj.get("schema"))[:80] if "schema" in obj else "none",
            wanted=SCHEMA,
        )
    fields = Fields(obj, where)
    index = _from_fields(fields)
    fields.end()
    _check_rules(index, where)
    # Every field was read by its type and none is left over, so that the object says all the bytes may say.
    if canonical(obj) != data:
        raise CorruptCheckpoint("the index was changed: it is not in its canonical form", where=where)
    counted = hashlib.sha256(_without_hash(data, index.index_sha256)).hexdigest()
    if counted != index.index_sha256:
        raise CorruptCheckpoint(
            "the index was changed: its sha256 differs", where=where, seen=counted, wanted=index.index_sha256
        )
    return index


def _without_hash(data: bytes, index_sha256: str) -> bytes:
    """The canonical form without the field index_sha256, which is a line of its own and never the last."""
    return data.replace(_hash_line(index_sha256), b"", 1)


def _hash_line(index_sha256: str) -> bytes:
    return f'  "index_sha256": "{index_sha256}",\n'.encode()


def read_index(folder: int | str | Path, *, where: str = "") -> CheckpointIndex:
    """Read index.json of a checkpoint.

    Args:
        folder: Its path, or an open descriptor of it.
        where: Path for errors when folder is a descriptor.

    Raises:
        FileNotFoundError: There is no folder, or no index in it.
        UnknownSchema, CorruptCheckpoint: As index_from_bytes; also when index.json is a link or no file.
        OSError: It can't be read.
    """
    if not isinstance(folder, int):
        fd = open_folder(folder)
        try:
            return read_index(fd, where=where or os.fspath(folder))
        finally:
            os.close(fd)
    path = str(Path(where, INDEX_FILE)) if where else INDEX_FILE
    return index_from_bytes(read_small_file(folder, INDEX_FILE, path, MAX_INDEX_BYTES), path)


def _to_json(index: CheckpointIndex) -> dict[str, Any]:
    """All fields but index_sha256."""
    names = [name for name in CheckpointIndex.__dataclass_fields__ if name != "index_sha256"]
    obj = {name: getattr(index, name) for name in names}
    return obj | {
        "schema": SCHEMA,
        "lineage": [list(pair) for pair in index.lineage],
        "saved_at": float(index.saved_at),
        "run_seconds": float(index.run_seconds),
        "shards": [
            {name: getattr(shard, name) for name in ShardRecord.__dataclass_fields__}
            for shard in index.shards
        ],
        "metrics": {name: float_to_json(value) for name, value in index.metrics.items()},
        "tags": list(index.tags),
        "versions": dict(index.versions),
    }


def _from_fields(fields: Fields) -> CheckpointIndex:
    fields.text("schema")
    layout = fields.choice("layout", ("single", "sharded"))
    return CheckpointIndex(
        run=fields.text("run"), run_id=fields.hexdigest("run_id", 32),
        client_id=fields.hexdigest("client_id", 32), snapshot=fields.count("snapshot"),
        sequence=fields.count("sequence"), parent=fields.count_or_none("parent"), lineage=_lineage(fields),
        step=fields.count("step", MAX_STEP), saved_at=fields.number("saved_at"),
        run_seconds=fields.number("run_seconds"),
        layout="single" if layout == "single" else "sharded",
        num_shards=fields.count("num_shards", MAX_SHARDS),
        shards=tuple(map(_shard, fields.objects("shards", MAX_SHARDS))),
        meta_sha256=fields.hexdigest_or_none("meta_sha256"), meta_bytes=fields.count_or_none("meta_bytes"),
        tensors_sha256=fields.hexdigest("tensors_sha256"), tensors_bytes=fields.count("tensors_bytes"),
        world_size=fields.count("world_size", 1_000_000), metrics=_metrics(fields),
        tags=fields.texts("tags"), versions=fields.text_by_name("versions"),
        index_sha256=fields.hexdigest("index_sha256"),
    )  # fmt: skip


def _shard(fields: Fields) -> ShardRecord:
    record = ShardRecord(
        shard=fields.count("shard", MAX_SHARDS), component=fields.text("component"), path=fields.text("path"),
        bytes=fields.count("bytes"), sha256=fields.hexdigest("sha256"), num_params=fields.count("num_params"),
        rank=fields.count("rank", 1_000_000),
    )  # fmt: skip
    fields.end()
    return record


def _lineage(fields: Fields) -> Lineage:
    ranges: list[tuple[int, int]] = []
    for pair in fields.items("lineage", MAX_SHARDS):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(end) is int for end in pair)):
            raise fields.wrong("lineage", pair, "pairs of sequences")
        low, high = pair
        if low > high or low < 0 or (ranges and low <= ranges[-1][1]):
            raise fields.wrong("lineage", pair, "ascending closed ranges")
        ranges.append((low, high))
    return tuple(ranges)


def _metrics(fields: Fields) -> dict[str, float]:
    where = f"{fields.where}: metrics"
    given = fields.by_name("metrics", MAX_METRICS)
    return {name: float_from_json(value, where=where) for name, value in given.items()}


def _check_rules(index: CheckpointIndex, where: str) -> None:
    """What must hold between the fields."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise CorruptCheckpoint(what, where=where)

    paths = [shard.path for shard in index.shards]
    need(index.num_shards == len(paths), "num_shards is not the number of shards")
    need(len(set(paths)) == len(paths), "a shard is listed twice")
    need(
        bool(index.lineage) and index.lineage[-1][1] == index.sequence,
        "the lineage doesn't end at the sequence",
    )
    need(index.parent is None or index.parent < index.sequence, "the parent isn't older than the checkpoint")
    need(index.world_size > 0, "world_size is 0")
    need(_is_run_name(index.run), "not a run name")
    if index.layout == "single":
        need(paths == [SINGLE_FILE], f"the single layout has one file, {SINGLE_FILE}")
        need(index.meta_sha256 is None and index.meta_bytes is None, f"the single layout has no {META_FILE}")
        return
    need(
        index.meta_sha256 is not None and index.meta_bytes is not None,
        f"the hash or size of {META_FILE} is missing",
    )
    for shard in index.shards:
        need(
            _SHARD_PATH.fullmatch(shard.path) is not None,
            f"not a shard's file name: {shard.path[:MAX_NAME_BYTES]!r}",
        )
        need(shard.rank < index.world_size, "a rank is not below world_size")
        need(
            shard.rank != 0 or shard.path == shard_file(shard.component, shard.shard),
            "a shard's path isn't its own",
        )


def _is_run_name(run: str) -> bool:
    try:
        check_run_name(run)
    except ValueError:
        return False
    return True
