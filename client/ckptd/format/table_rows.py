"""tensors.json: where in which file each tensor's bytes lie, so that a reader can read into place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptd.errors import CorruptCheckpoint, UnknownSchema
from ckptd.format.fields import Fields
from ckptd.format.strict_json import parse
from ckptd.format.tensor_table import TABLE_SCHEMA, canonical_table
from ckptd.limits import MAX_TABLE_BYTES, MAX_TENSOR_DIMS, MAX_TENSORS
from ckptd.snapshot import keypath


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor on disk.

    Attributes:
        key: Typed key path from the top of the state.
        file: Name of the file that holds it.
        dtype: Name without prefix.
        shape: Dimensions.
        stride: In elements; None for C order.
        offset: First byte of its data in the file.
        bytes: Length of its data.
        alias_of: Key of the tensor it is tied to, or None.
    """

    key: tuple[Any, ...]
    file: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    bytes: int
    alias_of: tuple[Any, ...] | None


def table_from_bytes(data: bytes, where: str) -> tuple[TensorRow, ...]:
    """Read and check the bytes of a tensors.json.

    Raises:
        UnknownSchema: It is of another version.
        CorruptCheckpoint: Not a strict, canonical table; an alias without its owner; a key twice.
    """
    obj = parse(data, where=where, max_bytes=MAX_TABLE_BYTES)
    if isinstance(obj, dict) and obj.get("schema") != TABLE_SCHEMA:
        raise UnknownSchema(
            "unknown schema", where=where, seen=repr(obj.get("schema"))[:80], wanted=TABLE_SCHEMA
        )
    fields = Fields(obj, where)
    fields.take("schema")
    rows = tuple(_row(item) for item in fields.objects("tensors", MAX_TENSORS))
    fields.end()
    if data != canonical_table(obj):
        raise CorruptCheckpoint("the table was changed: it is not in its canonical form", where=where)
    _check_keys(obj["tensors"], where)
    return rows


def faults_in_files(rows: tuple[TensorRow, ...], size_of: Mapping[str, int]) -> list[str]:
    """What the table says of files that can't be: unknown files, ranges outside of them."""
    faults = []
    for row in rows:
        if row.file not in size_of:
            faults.append(f"{keypath.show(row.key)} is in {row.file[:80]!r}, which the index doesn't list")
        elif row.offset + row.bytes > size_of[row.file]:
            faults.append(f"{keypath.show(row.key)} lies beyond the end of {row.file}")
    return faults


def _row(fields: Fields) -> TensorRow:
    alias = fields.take("alias_of")
    row = TensorRow(
        key=keypath.from_json(fields.take("key")), file=fields.text("file", 255),
        dtype=fields.text("dtype", 64), shape=_dims(fields, "shape"),
        stride=None if fields.take("stride") is None else _dims(fields, "stride"),
        offset=fields.count("offset"), bytes=fields.count("bytes"),
        alias_of=None if alias is None else keypath.from_json(alias),
    )  # fmt: skip
    fields.end()
    elements = math.prod(row.shape)
    if (elements == 0) != (row.bytes == 0) or (elements and row.bytes % elements):
        raise fields.wrong("bytes", row.bytes, f"a multiple of {elements} elements")
    if row.stride is not None and len(row.stride) != len(row.shape):
        raise fields.wrong("stride", row.stride, "one for each dimension")
    return row


def _dims(fields: Fields, name: str) -> tuple[int, ...]:
    dims = fields.items(name, MAX_TENSOR_DIMS)
    if any(type(dim) is not int or not 0 <= dim < 2**62 for dim in dims):
        raise fields.wrong(name, dims, "ints of 0 or more")
    return tuple(dims)


def _check_keys(rows: list[dict[str, Any]], where: str) -> None:
    # compared as text: as Python values 1, True and 1.0 would be one key
    owners = {repr(row["key"]) for row in rows if row["alias_of"] is None}
    aliases = [row for row in rows if row["alias_of"] is not None]
    if len(owners | {repr(row["key"]) for row in aliases}) != len(rows):
        raise CorruptCheckpoint("a tensor is listed twice", where=where)
    for row in aliases:
        if repr(row["alias_of"]) not in owners:
            raise CorruptCheckpoint(
                "an alias names no tensor of the table", where=where, seen=repr(row["alias_of"])[:80]
            )
