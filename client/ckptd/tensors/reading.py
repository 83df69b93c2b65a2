# ruff: noqa: TID253
"""A checkpoint's components from whoever has its bytes: a folder's files, a slot."""

from __future__ import annotations

import errno
import io
import mmap
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, TypeAlias, cast

import numpy
import torch

from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.reader import Reader
from ckptd.errors import CorruptCheckpoint, InvalidArgument, ReadFailed, UnknownSchema
from ckptd.format.archive_check import check_archive
from ckptd.format.records import CheckpointIndex
from ckptd.format.table_rows import TensorRow, faults_in_files, table_from_bytes
from ckptd.names import META_FILE, SINGLE_FILE, TABLE_FILE
from ckptd.tensors.collector import collector_held
from ckptd.tensors.loaded_tree import check_tree
from ckptd.tensors.moving import moved
from ckptd.tensors.shard_tensors import ShardTensors
from ckptd.tensors.single_file import LargeTensors, SparseFile, read_whole
from ckptd.tensors.tag_reader import decode
from ckptd.tensors.tags import MARKER
from ckptd.tensors.ties_across_files import tie_across_files
from ckptd.tensors.unread import NOTHING_UNREAD, Unread

_SCHEMAS: Final = {"single": "ckpt.v2", "sharded": "ckpt.v2-sharded"}
_BODIES: Final = frozenset({TABLE_FILE, META_FILE, SINGLE_FILE})
_SHORT: Final = ("allocate memory", "not enough memory", "out of memory", "start new thread")
_ENVELOPE: Final = frozenset({"schema", "wall_saved_at", "step"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory.

    Attributes:
        index: Its index; None for one of format v1.
        step: Finished optimizer steps.
        components: By name, "rng" among them; those that were asked for.
        names: Of all components that the checkpoint has.
        unread: Files that are still to be read; none of them, unless it was loaded lazily.
    """

    index: CheckpointIndex | None
    step: int
    components: dict[str, Any]
    names: tuple[str, ...]
    unread: Unread = NOTHING_UNREAD


def load_from(
    reader: Reader, device: torch.device, only: Collection[str] | None = None,
    *, absent_ok: bool = False, lazily: bool = False,
) -> Loaded:  # fmt: skip
    """Load the components of a checkpoint of format v2, whoever has its bytes.

    Args:
        reader: Has them. It isn't closed.
        device: For the tensors. RNG states stay on the CPU.
        only: Names of the components to load; None means all.
        absent_ok: Whether `only` may name what the checkpoint doesn't have.
        lazily: Leave the shards for `Loaded.unread`, which needs the reader open until they are read. On the CPU only.

    Raises:
        CorruptCheckpoint, UnknownSchema, InvalidArgument: As `ckptd.load` says.
        ReadFailed: It can't be read now.
    """
    with collector_held():
        plan = _Parts(reader, only, absent_ok=absent_ok)
        shards = plan.shards()
        unread = Unread([*shards.values(), *plan.large])
        if not lazily:
            unread.read({})
        return plan.put_together(shards, unread, device)


def load_mapped(
    reader: CheckpointReader, device: torch.device, only: Collection[str] | None = None
) -> Loaded:
    """As `load_from` of a folder's files, the shards in memory unproven: each byte is read where it is first looked at.

    What is written into the tensors stays in this process. Tied tensors of different files are compared, so read.
    """
    plan = _Parts(reader, only, absent_ok=False)
    return plan.put_together(plan.shards(lambda name: _Mapped(reader.map(name))), NOTHING_UNREAD, device)


class _Mapped:
    """The bytes of a mapped file, which each tensor over them keeps alive."""

    def __init__(self, content: mmap.mmap) -> None:
        self._bytes = numpy.frombuffer(content, numpy.uint8)

    def __call__(self, offset: int, size: int) -> torch.Tensor:
        return torch.from_numpy(self._bytes[offset : offset + size])


class _Parts:
    """What a checkpoint holds, still apart: its table and its small file, both proven."""

    def __init__(self, reader: Reader, only: Collection[str] | None, *, absent_ok: bool) -> None:
        self._reader = reader
        self._rows = _read_table(reader)
        self._payload, large = _meta(reader) if reader.index.layout == "sharded" else _single(reader)
        self._chosen = select(self._payload, only, absent_ok)
        self.large = _once(one for one in large if one.name in self._chosen)

    def shards(self, mapped: Callable[[str], _Mapped] | None = None) -> dict[str, ShardTensors]:
        """By name of the file, with memory of their own, or as it is mapped."""
        by_file: dict[str, list[TensorRow]] = {}
        for row in self._rows:
            by_file.setdefault(row.file, []).append(row)
        sizes = {shard.path: shard.bytes for shard in self._reader.index.shards}
        names = [name for name in self._reader.files if name not in _BODIES]
        return {
            name: ShardTensors(
                self._reader,
                name,
                sizes[name],
                by_file.get(name, ()),
                None if mapped is None else mapped(name),
            )
            for name in names
        }

    def put_together(self, shards: dict[str, ShardTensors], unread: Unread, device: torch.device) -> Loaded:
        reader, where = self._reader, f"{self._reader.path}/{TABLE_FILE}"
        tie_across_files(self._rows, self._payload, shards, where, unread)
        components = {
            name: decode(_with_tensors(value, shards, reader.path)) for name, value in self._chosen.items()
        }
        names = tuple(self._payload)
        return Loaded(reader.index, reader.index.step, moved(components, device), names, unread)


def _read_table(reader: Reader) -> tuple[TensorRow, ...]:
    where = f"{reader.path}/{TABLE_FILE}"
    rows = table_from_bytes(reader.read(TABLE_FILE), where)
    sizes = {shard.path: shard.bytes for shard in reader.index.shards}
    faults = faults_in_files(rows, sizes | {META_FILE: reader.index.meta_bytes or 0})
    if faults:
        raise CorruptCheckpoint("the table doesn't fit the files", where=where, seen="; ".join(faults[:5]))
    return rows


_Payload: TypeAlias = tuple[dict[str, Any], list[LargeTensors]]


def _meta(reader: Reader) -> _Payload:
    where, data = f"{reader.path}/{META_FILE}", reader.read(META_FILE)
    check_archive(data, where, ours=True)
    return _unpickled(reader, where, io.BytesIO(data)), []


def _single(reader: Reader) -> _Payload:
    where, content = f"{reader.path}/{SINGLE_FILE}", read_whole(reader)
    file = SparseFile(content, check_archive(content, where, ours=True))
    payload = _unpickled(reader, where, cast("IO[bytes]", file))
    large = file.large_tensors(payload)
    if large is None:
        return _unpickled(reader, where, io.BytesIO(content)), []
    return payload, large


def _once(parts: Iterable[LargeTensors]) -> list[LargeTensors]:
    """What is tied across components is the first one's."""
    met: set[int] = set()
    apart = []
    for part in parts:
        apart.append(part.without(met))
        met.update(part.memory)
    return apart


def _unpickled(reader: Reader, where: str, file: IO[bytes]) -> dict[str, Any]:
    """The content of meta.pt or ckpt.pt, without its envelope."""
    try:
        payload = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        seen = f"{type(error).__name__}: {str(error)[:200]}"
        if number := _what_is_short(error):
            raise ReadFailed("it can't be read now", where=where, seen=seen, errno=number) from error
        raise CorruptCheckpoint(
            "torch can't read it, though its bytes are those committed", where=where, seen=seen
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


def _what_is_short(error: Exception) -> int | None:
    """The error's number where memory, descriptors or threads were short: torch says so of memory in words only."""
    if isinstance(error, OSError):
        return error.errno
    words = str(error) if isinstance(error, RuntimeError) else ""
    return errno.ENOMEM if isinstance(error, MemoryError) or any(map(words.__contains__, _SHORT)) else None


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


def select(components: dict[str, Any], only: Collection[str] | None, absent_ok: bool) -> dict[str, Any]:
    """The components that `only` names; InvalidArgument for one that isn't there, unless absent_ok."""
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
