"""Writing tensors.json: where in which file each tensor's bytes lie. `ckptd.format.table_rows` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ckptd.format.strict_json import compact
from ckptd.snapshot import keypath

if TYPE_CHECKING:  # who reads tables, the verifier too, has no use for the snapshot's types
    from ckptd.snapshot.descriptor import TensorSpec

TABLE_SCHEMA: Final = "ckpt.v2-tensors"


def canonical_table(table: Any) -> bytes:
    """The only accepted bytes of a tensor table: sorted keys, no spaces, a newline at the end, ASCII.

    Compact, unlike the index: with line breaks, the table is four times as long and far slower to write.
    """
    return compact(table)


def tensor_table(rows: Sequence[TensorSpec], places: Mapping[int, tuple[str, int]]) -> bytes:
    """The bytes of the table, in the order of rows.

    Args:
        rows: The snapshot's tensors.
        places: Row → (file, byte in that file at which its data begin).
    """
    entries = [_entry(rows, index, *places[index]) for index in range(len(rows)) if index in places]
    return canonical_table({"schema": TABLE_SCHEMA, "tensors": entries})


def _entry(rows: Sequence[TensorSpec], index: int, file: str, offset: int) -> dict[str, Any]:
    row = rows[index]
    return {
        "key": keypath.to_json(row.path),
        "file": file,
        "dtype": row.dtype,
        "shape": row.shape,
        "stride": row.stride,
        "offset": offset,
        "bytes": row.nbytes,
        "alias_of": None if row.alias_of is None else keypath.to_json(rows[row.alias_of].path),
    }
