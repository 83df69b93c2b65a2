"""What must hold for a descriptor: each tensor row for itself, the rows together, the refs into them.

Pure checks; they raise ProtocolError, because a descriptor that breaks one wasn't made by `ckptd.tensors.capture`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ckptd import names
from ckptd.errors import InvalidArgument, ProtocolError
from ckptd.format.storage_types import STORAGE_TYPES
from ckptd.limits import MAX_BASES, MAX_METRICS, MAX_TENSOR_DIMS, MAX_TENSORS, MAX_TREE_DEPTH
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import Descriptor, TensorSpec
from ckptd.snapshot.values import TensorRef

#: Top-level names of the files' own fields.
RESERVED_NAMES = frozenset({"schema", "wall_saved_at", "step"})

_MAX_BYTES = 2**60
_DIFFERENTIABLE = ("float", "bfloat", "complex", "bcomplex")
_HEX = frozenset("0123456789abcdef")


def check_descriptor(descriptor: Descriptor) -> None:
    """Raise ProtocolError unless every number in descriptor is possible and all of them fit together."""
    d = descriptor
    try:
        names.check_run_name(d.run)
        names.check_step(d.step)
    except InvalidArgument as error:
        raise ProtocolError(
            error.what, where=error.where, seen=error.seen[:200], wanted=error.wanted
        ) from error
    if len(d.client_id) != 32 or not _HEX.issuperset(d.client_id):
        raise _bad("client_id", d.client_id, "32 hex digits")
    if d.snapshot < 1:
        raise _bad("snapshot", d.snapshot, "1 or more")
    if not math.isfinite(d.saved_at) or not math.isfinite(d.run_seconds) or d.run_seconds < 0:
        raise _bad("saved_at, run_seconds", (d.saved_at, d.run_seconds), "finite seconds")
    if d.base_sequence is not None and d.base_sequence < 0:
        raise _bad("base_sequence", d.base_sequence, "0 or more, or None")
    if d.base_before and (d.base_sequence is None or not _descends((d.base_sequence, *d.base_before))):
        raise _bad("base_before", d.base_before[:9], f"at most {MAX_BASES}, each before the one it follows")
    if d.begins_line and d.base_sequence is not None:
        raise _bad("begins_line", f"true after sequence {d.base_sequence}", "one of them")
    if not 0 <= d.base_snapshot < d.snapshot:
        raise _bad("base_snapshot", d.base_snapshot, f"0 or more, before snapshot {d.snapshot}")
    if not 0 <= d.data_bytes <= _MAX_BYTES:
        raise _bad("data_bytes", d.data_bytes, f"0 to {_MAX_BYTES}")
    _check_mappings(d)
    check_rows(d.tensors, d.data_bytes)
    if _refs(d.state) != set(range(len(d.tensors))):
        raise _bad("state", "refs to other rows", f"each of the {len(d.tensors)} tensors")


def _descends(sequences: Sequence[int]) -> bool:
    """Whether each is 0 or more and below the one before it, and there aren't too many."""
    if len(sequences) > MAX_BASES + 1 or sequences[-1] < 0:
        return False
    return all(after < before for before, after in pairwise(sequences))


def _check_mappings(d: Descriptor) -> None:
    if type(d.metrics) is not dict or len(d.metrics) > MAX_METRICS:
        raise _bad("metrics", type(d.metrics).__name__, f"a dict of at most {MAX_METRICS}")
    if any(type(k) is not str or type(v) is not float for k, v in d.metrics.items()):
        raise _bad("metrics", "other types", "names and floats")
    if type(d.versions) is not dict or any(type(x) is not str for kv in d.versions.items() for x in kv):
        raise _bad("versions", "other types", "a dict of strings")
    if type(d.state) is not dict:
        raise _bad("state", type(d.state).__name__, "a dict")
    if taken := RESERVED_NAMES.intersection(key for key in d.state if type(key) is str):
        raise _bad("state", sorted(taken), "none of the names of the files' own fields")


def check_rows(rows: Sequence[TensorSpec], data_bytes: int) -> None:
    """Raise ProtocolError unless each row is possible, lies within data_bytes, and overlaps no other."""
    if len(rows) > MAX_TENSORS:
        raise _bad("tensors", len(rows), f"at most {MAX_TENSORS}")
    paths: set[Any] = set()
    extents: list[tuple[int, int]] = []
    for row in rows:
        _check_row(row, data_bytes)
        paths.add(row.path)
        if row.alias_of is not None:
            _check_alias(row, rows)
        elif row.nbytes:
            extents.append((row.offset, row.offset + row.nbytes))
    if len(paths) != len(rows) and len({str(keypath.to_json(row.path)) for row in rows}) != len(rows):
        raise _bad("tensors", "two with one path", "one row per path")
    extents.sort()
    end = 0
    for start, stop in extents:
        if start < end:
            raise _bad("tensors", f"two share byte {start}", "aliases only")
        end = stop


def _check_row(row: TensorSpec, data_bytes: int) -> None:
    if (
        type(row.path) is not tuple
        or not 1 <= len(row.path) <= MAX_TREE_DEPTH
        or not keypath.is_key(row.path)
    ):
        raise _bad("path", repr(row.path)[:200], f"1 to {MAX_TREE_DEPTH} plain keys")
    kind = STORAGE_TYPES.get(row.dtype)
    if kind is None or kind.itemsize != row.itemsize:
        raise _bad_row(row, f"dtype {row.dtype[:64]} of {row.itemsize} bytes", "a dtype an archive can hold")
    if row.requires_grad and not row.dtype.startswith(_DIFFERENTIABLE):
        raise _bad_row(row, f"requires_grad for {row.dtype}", "a floating or complex dtype")
    if len(row.shape) > MAX_TENSOR_DIMS or min(row.shape, default=0) < 0:
        raise _bad_row(row, f"shape {row.shape}", f"at most {MAX_TENSOR_DIMS} dimensions of 0 or more")
    if row.nbytes != math.prod(row.shape) * row.itemsize:
        raise _bad_row(row, f"{row.nbytes} bytes for shape {row.shape}", "numel * itemsize")
    if row.offset < 0 or row.offset + row.nbytes > data_bytes:
        raise _bad_row(row, f"bytes {row.offset} to {row.offset + row.nbytes}", f"within {data_bytes}")
    if row.stride is not None and not is_dense(row.shape, row.stride):
        raise _bad_row(row, f"stride {row.stride} for shape {row.shape}", "a dense layout")


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor of this shape and stride fill numel places without gap or overlap.

    Strides are counted in elements. The stride of a dimension of size 1, and every stride of a tensor without
    elements, says nothing and may be any number from 0 on.
    """
    if len(shape) != len(stride) or min(stride, default=0) < 0:
        return False
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _check_alias(row: TensorSpec, rows: Sequence[TensorSpec]) -> None:
    number = row.alias_of
    if number is None or not 0 <= number < len(rows) or rows[number].alias_of is not None:
        raise _bad_row(row, f"alias of row {number}", "a row that isn't an alias itself")
    owner = rows[number]
    mine = (row.dtype, row.shape, row.stride, row.offset, row.nbytes)
    if mine != (owner.dtype, owner.shape, owner.stride, owner.offset, owner.nbytes):
        raise _bad_row(row, "an alias unlike its owner", "the same dtype, shape, stride and bytes")


def _refs(tree: Any) -> set[int]:
    """The tensor rows that a tree refers to."""
    found: set[int] = set()
    pending = [tree]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is TensorRef:
            found.add(value.index)
        elif kind is list or kind is tuple or kind is set:
            pending.extend(value)
        elif kind is dict or kind is OrderedDict:
            pending.extend(value.values())
            if kind is OrderedDict and value.__dict__:
                pending.append(value._metadata)
    return found


def _bad(where: str, seen: object, wanted: str) -> ProtocolError:
    return ProtocolError("not a descriptor", where=where, seen=str(seen)[:200], wanted=wanted)


def _bad_row(row: TensorSpec, seen: str, wanted: str) -> ProtocolError:
    return _bad(keypath.show(row.path)[:400], seen, wanted)
