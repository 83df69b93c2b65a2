"""A descriptor as bytes and back: what lies in a slot beside the tensors' data.

A msgpack envelope holds the plain fields, and as columns (`ckptd.snapshot.tree_columns`) state, metrics, versions and
paths. Decoding is safe on hostile bytes: memory stays in proportion to their length, which is bounded, and
whatever is wrong with them is a ProtocolError.
"""

from __future__ import annotations

import math
from array import array
from itertools import chain
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ckptd.errors import CkptdError, ProtocolError, UnstorableState
from ckptd.format.storage_types import STORAGE_TYPES
from ckptd.limits import MAX_DESCRIPTOR_BYTES, MAX_TENSOR_DIMS, MAX_TENSORS
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import Descriptor, Sharding, ShardingBy, TensorSpec
from ckptd.snapshot.descriptor_rules import check_descriptor
from ckptd.snapshot.tree_columns import Columns, little_endian
from ckptd.snapshot.tree_reader import TreeReader, numbers
from ckptd.snapshot.tree_writer import TreeWriter

FORMAT: Final = "ckptd.snapshot.descriptor-3"
#: The same without `base_before`, and without `begins_line`: what an earlier version sealed is still written.
FORMAT_2: Final = "ckptd.snapshot.descriptor-2"
FORMAT_1: Final = "ckptd.snapshot.descriptor-1"
#: How many of the last fields each has.
_LATE_FIELDS: Final = {FORMAT: 2, FORMAT_2: 1, FORMAT_1: 0}

_REQUIRES_GRAD, _PARAMETER, _STRIDE = 1, 2, 4

_Text = Annotated[str, Meta(max_length=128)]


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    format: _Text
    run: _Text
    client_id: _Text
    snapshot: int
    step: int
    saved_at: float
    run_seconds: float
    base_sequence: int | None
    base_snapshot: int
    data_bytes: int
    sharding_by: _Text
    shards: int | Literal["auto"]
    tensors: int
    rows: bytes  #: see _rows_to_column
    ops: bytes
    ints: bytes
    floats: bytes
    string_lengths: bytes
    text: bytes
    blob_lengths: bytes
    blobs: bytes
    begins_line: bool | UnsetType = (
        UNSET  #: from here on what earlier formats lack, in the order in which it came
    )
    base_before: tuple[int, ...] | UnsetType = UNSET


#: How a walk over hostile columns may end, when they run out or say what can't be.
_HOSTILE = (ValueError, TypeError, LookupError, StopIteration, OverflowError, RecursionError, MemoryError)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode(descriptor: Descriptor) -> bytes:
    """The bytes of descriptor; `decode` gives back an equal one, in value and in type.

    Raises:
        UnstorableState: A leaf has no exact form: a type that isn't one of ckptd.snapshot.values, text that isn't
            valid Unicode, an integer over 255 bytes, a dtype no archive can hold, over 100 levels. `where` is
            its key path.
    """
    d = descriptor
    tree = TreeWriter()
    tree.write(d.state)
    tree.write(d.metrics, where=("metrics",))
    tree.write(d.versions, where=("versions",))
    dtypes = list(dict.fromkeys(row.dtype for row in d.tensors))
    tree.write(dtypes, where=("dtypes",))
    tree.write(tuple(chain.from_iterable(row.path for row in d.tensors)), where=("paths",))
    rows = _rows_to_column(d.tensors, {name: number for number, name in enumerate(dtypes)})
    columns = tree.columns()
    data = _encode(
        _Envelope(
            format=FORMAT, run=d.run, client_id=d.client_id, snapshot=d.snapshot, step=d.step,
            saved_at=d.saved_at, run_seconds=d.run_seconds, base_sequence=d.base_sequence,
            base_snapshot=d.base_snapshot, data_bytes=d.data_bytes,
            sharding_by=d.sharding.by, shards=d.sharding.shards,
            tensors=len(d.tensors), rows=rows,
            ops=columns.ops, ints=columns.ints, floats=columns.floats, string_lengths=columns.string_lengths,
            text=columns.text, blob_lengths=columns.blob_lengths, blobs=columns.blobs,
            begins_line=d.begins_line, base_before=d.base_before,
        )
    )  # fmt: skip
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise UnstorableState(
            "too much outside of tensors", where="state", seen=f"{len(data)} bytes",
            wanted=f"at most {MAX_DESCRIPTOR_BYTES}", todo="keep large data in tensors",
        )  # fmt: skip
    return data


def _rows_to_column(rows: tuple[TensorSpec, ...], dtype_number: dict[str, int]) -> bytes:
    # Per row: keys in its path (all paths lie in one tuple), dtype number, flags, offset, alias_of + 1,
    # dimensions, shape, and the stride if there is one.
    column: list[int] = []
    extend = column.extend
    for row in rows:
        kind = STORAGE_TYPES.get(row.dtype)
        if kind is None or kind.itemsize != row.itemsize:
            raise UnstorableState(
                "a dtype no archive can hold", where=keypath.show(row.path), seen=str(row.dtype)
            )
        flags = (row.requires_grad and _REQUIRES_GRAD) | (row.parameter and _PARAMETER)
        flags |= 0 if row.stride is None else _STRIDE
        alias = 0 if row.alias_of is None else row.alias_of + 1
        extend((len(row.path), dtype_number[row.dtype], flags, row.offset, alias, len(row.shape), *row.shape))
        extend(row.stride or ())
    return little_endian(array("q", column)).tobytes()


def decode(data: bytes | memoryview) -> Descriptor:
    """The descriptor in data, checked throughout: types, limits, rows against each other and data_bytes.

    Raises:
        ProtocolError: data is anything else than what `encode` makes.
    """
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise ProtocolError(
            "descriptor too long", seen=f"{len(data)} bytes", wanted=f"at most {MAX_DESCRIPTOR_BYTES}"
        )
    try:
        envelope = _decoder.decode(data)
        _check_format(envelope)
        descriptor = _open(envelope)
        check_descriptor(descriptor)
    except ProtocolError:
        raise
    except (CkptdError, msgspec.DecodeError, *_HOSTILE) as error:
        raise ProtocolError("not a descriptor", seen=f"{type(error).__name__}: {error}"[:200]) from error
    return descriptor


def _check_format(envelope: _Envelope) -> None:
    late = _LATE_FIELDS.get(envelope.format)
    if late is None:
        raise ProtocolError("unknown descriptor format", seen=envelope.format, wanted=FORMAT)
    seen = [field is not UNSET for field in (envelope.begins_line, envelope.base_before)]
    if seen != [number < late for number in range(len(seen))]:
        raise ProtocolError(
            "not a descriptor", where="begins_line, base_before", seen=str(seen), wanted=envelope.format
        )


def _open(e: _Envelope) -> Descriptor:
    tree = TreeReader(
        Columns(
            ops=e.ops, ints=e.ints, floats=e.floats, string_lengths=e.string_lengths, text=e.text,
            blob_lengths=e.blob_lengths, blobs=e.blobs,
        )
    )  # fmt: skip
    state, metrics, versions, dtypes = tree.read(), tree.read(), tree.read(), tree.read()
    if not 0 <= e.tensors <= MAX_TENSORS or type(dtypes) is not list or len(dtypes) > len(STORAGE_TYPES):
        raise ProtocolError("not a descriptor", where="tensors", seen=f"{e.tensors} tensors")
    paths = tree.read()
    tree.finish()
    if type(paths) is not tuple:
        raise ProtocolError("not a descriptor", where="tensors", seen="no paths")
    return Descriptor(
        run=e.run, client_id=e.client_id, snapshot=e.snapshot, step=e.step, saved_at=e.saved_at,
        run_seconds=e.run_seconds, base_sequence=e.base_sequence, base_snapshot=e.base_snapshot,
        begins_line=e.begins_line is True, base_before=() if e.base_before is UNSET else e.base_before,
        metrics=metrics, versions=versions, state=state, data_bytes=e.data_bytes,
        tensors=_rows(numbers(e.rows, "q").tolist(), e.tensors, paths, dtypes),
        sharding=Sharding(by=_by(e.sharding_by), shards=e.shards),
    )  # fmt: skip


def _by(name: str) -> ShardingBy:
    return name  # type: ignore[return-value]  # Sharding refuses every other name


def _rows(column: list[int], count: int, paths: tuple[Any, ...], dtypes: list[str]) -> tuple[TensorSpec, ...]:
    kinds = [(name, STORAGE_TYPES[name].itemsize) for name in dtypes]
    rows: list[TensorSpec] = []
    at = path_at = 0
    for _ in range(count):
        keys, dtype_number, flags, offset, alias, dims = column[at : at + 6]
        if (
            keys < 1
            or dtype_number < 0
            or not 0 <= flags < 8
            or alias < 0
            or not 0 <= dims <= MAX_TENSOR_DIMS
        ):
            raise ProtocolError("not a descriptor", where="tensors", seen=str(column[at : at + 6]))
        start, stop = at + 6, at + 6 + dims
        at = stop + dims if flags & _STRIDE else stop
        shape = tuple(column[start:stop])
        dtype, itemsize = kinds[dtype_number]
        rows.append(
            TensorSpec(
                path=paths[path_at : path_at + keys], dtype=dtype, itemsize=itemsize, shape=shape,
                stride=tuple(column[stop:at]) if flags & _STRIDE else None, offset=offset,
                nbytes=math.prod(shape) * itemsize, alias_of=alias - 1 if alias else None,
                requires_grad=flags & _REQUIRES_GRAD != 0, parameter=flags & _PARAMETER != 0,
            )
        )  # fmt: skip
        path_at += keys
    if at != len(column) or path_at != len(paths):
        raise ProtocolError("not a descriptor", where="tensors", seen="more or fewer numbers than rows")
    return tuple(rows)
