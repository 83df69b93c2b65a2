# ruff: noqa: TID253
"""`load`: a checkpoint's components, from bytes that were all checked against their hashes."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ckptd.disk.checkpoint_reader import CheckpointReader, Span
from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.disk.wrong_path import refuse_wrong_path
from ckptd.errors import CkptdError, CorruptCheckpoint, InvalidArgument, UnknownSchema
from ckptd.format.archive_check import check_archive, check_head
from ckptd.format.records import SCHEMA_V1, CheckpointIndex
from ckptd.format.table_rows import TensorRow, faults_in_files, table_from_bytes
from ckptd.limits import MAX_INDEX_BYTES, MAX_TABLE_BYTES
from ckptd.names import INDEX_FILE, META_FILE, SINGLE_FILE, TABLE_FILE
from ckptd.tensors.loaded_tree import check_tree
from ckptd.tensors.moving import moved
from ckptd.tensors.registered_tags import refuse_changed
from ckptd.tensors.shard_tensors import ShardTensors
from ckptd.tensors.tag_reader import decode
from ckptd.tensors.tags import MARKER
from ckptd.tensors.ties_across_files import tie_across_files

_SCHEMAS: Final = {"single": "ckpt.v2", "sharded": "ckpt.v2-sharded"}
_ENVELOPE: Final = frozenset({"schema", "wall_saved_at", "step"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        index: Its index; None for one of format v1.
        step: Finished optimizer steps.
        components: By name, "rng" among them; those that were asked for.
        names: Of all components that the checkpoint has.
    """

    index: CheckpointIndex | None
    step: int
    components: dict[str, Any]
    names: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of any format version, every byte checked against its hash (v1 has not all of them).

    Args:
        path: The checkpoint's folder; for format v1 also its ckpt.pt.
        map_location: Device for the tensors. RNG states stay on the CPU.
        only: Names of the components to load; the files of others aren't read. None means all.

    Returns:
        {"model": state_dict, "optimizer": …, "rng": …}: what was saved, with plain values for objects.
        Generators come back as generators. Tied tensors share their memory, also those of different components and
        files; what `only` leaves out isn't read, and what was tied to it has a memory of its own. An instance of a
        registered class (`ckptd.register_type`) that this process hasn't registered is a
        `ckptd.tensors.registered_tags.Unbuilt`.

    Raises:
        CheckpointGone: It isn't there, or was deleted before it was opened.
        CorruptCheckpoint: Bytes are not those committed; where, seen and wanted say which.
        UnknownSchema: It is of a version this one can't read.
        StateMismatch: A class registered here has other fields, members or values than when it was saved.
        InvalidArgument: `only` names a component it doesn't have, map_location isn't a device that this torch
            can use, or path is a file of a checkpoint, a run's folder or a root.
        NothingThere: path is a folder with nothing of a checkpoint in it.
    """
    components = load_with_index(path, map_location=map_location, only=only).components
    refuse_changed(components, os.fspath(path))
    return components


def load_with_index(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    only: Collection[str] | None = None,
    absent_ok: bool = False,
) -> Loaded:
    """As `load`, with the index that proves the bytes; with absent_ok `only` may name what it doesn't have."""
    device = _device(map_location)
    if isinstance(only, str):
        raise InvalidArgument("not a list of components", where="only", seen=repr(only), wanted=f"[{only!r}]")
    refuse_wrong_path(path)
    if _is_v1(Path(path)):
        return _load_v1(path, device, only, absent_ok)
    with CheckpointReader(os.fspath(path), only=only) as reader:
        components, names = _read(reader, only, absent_ok)
        index = reader.index
    return Loaded(index, index.step, moved(components, device), names)


def _device(map_location: str | torch.device) -> torch.device:
    seen = repr(map_location)[:80]
    try:
        device = torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            "not a device", where="map_location", seen=seen, wanted='"cpu", "cuda:0", …'
        ) from error
    try:
        torch.empty(0, device=device)  # found out now, not after the whole checkpoint was read
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asserts that it was built with CUDA
        raise InvalidArgument(
            "this torch can't use the device", where="map_location",
            seen=f"{seen}: {str(error).partition(chr(10))[0]}"[:200], todo='use map_location="cpu"',
        ) from error  # fmt: skip
    return device


# --- format v1 ------------------------------------------------------------------------------------


def _is_v1(path: Path) -> bool:
    """Whether path looks like format v1: a file, or a folder whose index says so, or that has only a ckpt.pt.

    Only the look: `ckptd.tensors.v1` reads the schema strings and refuses what isn't v1.
    """
    if path.is_file():
        return True
    if os.path.lexists(path / TABLE_FILE):
        return False
    try:
        folder = open_folder(os.path.realpath(path))
    except OSError:
        return False
    try:
        index = read_small_file(folder, INDEX_FILE, str(path), MAX_INDEX_BYTES)
        return f'"{SCHEMA_V1}"'.encode() in index
    except FileNotFoundError:
        return (path / SINGLE_FILE).is_file()
    except (OSError, CorruptCheckpoint):
        return False
    finally:
        os.close(folder)


def _load_v1(
    path: str | os.PathLike[str], device: torch.device, only: Collection[str] | None, absent_ok: bool
) -> Loaded:
    from ckptd.tensors.v1 import read_v1

    found = read_v1(path)
    chosen = moved(_select(found.components, only, absent_ok), device)
    return Loaded(None, found.step, chosen, tuple(found.components))


# --- format v2 ------------------------------------------------------------------------------------


def _read(
    reader: CheckpointReader, only: Collection[str] | None, absent_ok: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    rows = _read_table(reader)
    body = META_FILE if reader.index.layout == "sharded" else SINGLE_FILE
    payload = _payload(reader, body)
    chosen = _select(payload, only, absent_ok)
    shards = _read_shards(reader, rows)
    tie_across_files(rows, payload, shards, f"{reader.path}/{TABLE_FILE}")
    components = {name: decode(_with_tensors(value, shards, reader.path)) for name, value in chosen.items()}
    return components, tuple(payload)


def _read_table(reader: CheckpointReader) -> tuple[TensorRow, ...]:
    where = f"{reader.path}/{TABLE_FILE}"
    rows = table_from_bytes(reader.read(TABLE_FILE), where)
    sizes = {shard.path: shard.bytes for shard in reader.index.shards}
    faults = faults_in_files(rows, sizes | {META_FILE: reader.index.meta_bytes or 0})
    if faults:
        raise CorruptCheckpoint("the table doesn't fit the files", where=where, seen="; ".join(faults[:5]))
    return rows


def _payload(reader: CheckpointReader, name: str) -> dict[str, Any]:
    """The content of meta.pt or ckpt.pt, without its envelope."""
    where = f"{reader.path}/{name}"
    data = reader.read(name)
    check_archive(data, where, ours=True)
    try:
        payload = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpoint(
            "torch can't read it, though its bytes are those committed",
            where=where,
            seen=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error
    schema = payload.get("schema") if isinstance(payload, dict) else None
    if schema != _SCHEMAS[reader.index.layout]:
        raise UnknownSchema(
            "unknown schema", where=where, seen=repr(schema)[:80], wanted=_SCHEMAS[reader.index.layout]
        )
    if payload.get("step") != reader.index.step:
        raise CorruptCheckpoint(
            "another step than index.json says",
            where=where,
            seen=repr(payload.get("step"))[:80],
            wanted=str(reader.index.step),
        )
    check_tree(payload, where)
    return {key: value for key, value in payload.items() if key not in _ENVELOPE}


def _read_shards(reader: CheckpointReader, rows: tuple[TensorRow, ...]) -> dict[str, ShardTensors]:
    """All open shards, read and hashed in parallel; hashing releases the interpreter lock."""
    by_file: dict[str, list[TensorRow]] = {}
    for row in rows:
        by_file.setdefault(row.file, []).append(row)
    bodies = {TABLE_FILE, META_FILE, SINGLE_FILE}
    shards = {
        name: ShardTensors(by_file.get(name, []), f"{reader.path}/{name}")
        for name in reader.files
        if name not in bodies
    }
    if not shards:
        return {}
    sizes = {shard.path: shard.bytes for shard in reader.index.shards}
    with ThreadPoolExecutor(min(len(shards), len(os.sched_getaffinity(0))), "ckptd-read") as pool:
        reads = [pool.submit(_read_shard, reader, name, shard, sizes) for name, shard in shards.items()]
        faults = [fault for read in reads if (fault := read.exception()) is not None]
    for fault in sorted(faults, key=lambda fault: not isinstance(fault, CkptdError)):
        raise fault
    return shards


def _read_shard(reader: CheckpointReader, name: str, shard: ShardTensors, sizes: Mapping[str, int]) -> None:
    # A shard of empty tensors only has no data: all of it is head.
    head = bytearray(shard.spans[0].offset if shard.spans else min(sizes[name], MAX_TABLE_BYTES))
    reader.read_into(name, [Span(0, memoryview(head)), *shard.spans] if head else shard.spans)
    check_head(head, f"{reader.path}/{name}")


def _with_tensors(value: Any, shards: Mapping[str, ShardTensors], where: str) -> Any:
    """value with the tensor from its shard for every tag of one; containers are changed in place."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        if value.get(MARKER) == "tensor":
            return _from_shard(value, shards, where)
        for key, item in value.items():
            value[key] = _with_tensors(item, shards, where)
        if kind is OrderedDict and "_metadata" in vars(value):
            value._metadata = _with_tensors(value._metadata, shards, where)
    elif kind is list:
        value[:] = [_with_tensors(item, shards, where) for item in value]
    elif kind is tuple:
        return tuple(_with_tensors(item, shards, where) for item in value)
    return value


def _from_shard(tag: dict[str, Any], shards: Mapping[str, ShardTensors], where: str) -> torch.Tensor:
    shard = shards.get(tag.get("file", ""))
    tensor = None if shard is None else shard.tensors.get(tag.get("key", ""))
    if tensor is None:
        raise CorruptCheckpoint(
            "meta.pt names a tensor that no shard holds",
            where=where,
            seen=f"{tag.get('file')}: {tag.get('key')}"[:200],
        )
    if tag.get("parameter"):
        return torch.nn.Parameter(tensor, requires_grad=bool(tag.get("requires_grad")))
    return tensor.requires_grad_() if tag.get("requires_grad") else tensor


def _select(components: dict[str, Any], only: Collection[str] | None, absent_ok: bool) -> dict[str, Any]:
    if only is None:
        return components
    unknown = [] if absent_ok else [name for name in only if name not in components]
    if unknown:
        raise InvalidArgument(
            "no such component",
            where="only",
            seen=", ".join(map(repr, unknown)),
            wanted=", ".join(map(repr, components)),
        )
    return {name: value for name, value in components.items() if name in only}
