# ruff: noqa: TID253
"""Ties between tensors of different files of one checkpoint: one memory again, as when it was saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ckptd.errors import CorruptCheckpoint
from ckptd.format.sharding import shard_key
from ckptd.format.strict_json import compact
from ckptd.format.table_rows import TensorRow
from ckptd.names import META_FILE
from ckptd.snapshot import keypath
from ckptd.tensors.flat import flat
from ckptd.tensors.shard_tensors import ShardTensors
from ckptd.tensors.unread import Unread

_Met: TypeAlias = tuple[TensorRow, torch.Tensor]


def tie_across_files(
    rows: Sequence[TensorRow], payload: Mapping[str, Any], shards: Mapping[str, ShardTensors], where: str,
    unread: Unread,
) -> None:  # fmt: skip
    """Let the shards' tensors that the table ties share memory, across files and with what lies in meta.pt.

    Each component's shards hold all its bytes, so that a component can be read alone; of those read here one copy
    stays. Files that weren't opened take no part.

    Args:
        rows: The table.
        payload: Of meta.pt, its tensors in the order of the table.
        shards: The open shards. Changed in place.
        where: The table's path, for errors.
        unread: Those of them that aren't read yet; the tied ones are, and their hashes checked.

    Raises:
        CorruptCheckpoint: Tensors that the table ties differ in dtype, shape, strides or a byte.
    """
    if all(row.alias_of is None for row in rows):
        return
    groups: dict[bytes, list[TensorRow]] = {}
    for row in rows:
        if row.bytes:
            groups.setdefault(compact(keypath.to_json(row.alias_of or row.key)), []).append(row)
    groups = {key: group for key, group in groups.items() if len({row.file for row in group}) > 1}
    if not groups:
        return
    in_meta = _in_meta(rows, payload, where)
    for group in groups.values():
        met = [found for row in group if (found := _found(row, in_meta, shards)) is not None]
        unread.need([tensor for _, tensor in met] if len(met) > 1 else [])
        met.sort(key=lambda found: found[0].file != META_FILE)  # first, as it lies in the payload already
        for other in met[1:]:
            if (
                other[0].file != META_FILE or met[0][0].file != META_FILE
            ):  # torch ties those of one archive itself
                _tie(met[0], other, shards, where)


def _found(
    row: TensorRow, in_meta: Mapping[int, torch.Tensor], shards: Mapping[str, ShardTensors]
) -> _Met | None:
    if row.file == META_FILE:
        return row, in_meta[id(row)]
    shard = shards.get(row.file)
    return None if shard is None else (row, shard.tensors[shard_key(row.key[1:])])


def _in_meta(rows: Sequence[TensorRow], payload: Any, where: str) -> dict[int, torch.Tensor]:
    """The tensors of meta.pt by the identity of their row: both are in the order in which the state was walked."""
    there = [row for row in rows if row.file == META_FILE]
    tensors = list(tensors_in(payload))
    if len(tensors) != len(there):
        raise CorruptCheckpoint(
            "the table doesn't fit the files", where=where,
            seen=f"{len(there)} tensors of {META_FILE}", wanted=f"{len(tensors)}",
        )  # fmt: skip
    return {id(row): tensor for row, tensor in zip(there, tensors, strict=True)}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a payload, as often as they are met, in the order in which the state was walked."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
        if type(value) is OrderedDict:
            yield from tensors_in(vars(value).get("_metadata"))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def _tie(first: _Met, other: _Met, shards: Mapping[str, ShardTensors], where: str) -> None:
    (owner, kept), (row, tensor) = first, other
    if not _equal(owner, kept, row, tensor):
        raise CorruptCheckpoint(
            "tensors that the table ties are not equal", where=where,
            seen=f"{keypath.show(row.key)} in {row.file}", wanted=f"{keypath.show(owner.key)} in {owner.file}",
        )  # fmt: skip
    if row.file != META_FILE:
        # A tensor of its own over the same memory: each of them may be told to require a gradient.
        shards[row.file].tensors[shard_key(row.key[1:])] = kept.detach()


def _equal(owner: TensorRow, kept: torch.Tensor, row: TensorRow, tensor: torch.Tensor) -> bool:
    look = (owner.dtype, owner.shape, owner.stride)
    if look != (row.dtype, row.shape, row.stride):
        return False
    if (kept.dtype, kept.shape, kept.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
        return False
    return kept.data_ptr() == tensor.data_ptr() or torch.equal(flat(kept), flat(tensor))
