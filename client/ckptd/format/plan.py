"""The files of one checkpoint, planned from its descriptor before the first byte is written. Pure, no torch.

Every file is a list of segments, each literal bytes or a range of the snapshot's data region; so the writer
can write and hash files in parallel straight from the slot.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ckptd import names
from ckptd.format.archive import ArchivePlan, Segment, SlotRange, plan_archive
from ckptd.format.sharding import assign, shard_key
from ckptd.format.tensor_table import tensor_table
from ckptd.limits import MIB, SINGLE_FILE_BELOW_BYTES
from ckptd.snapshot.descriptor import Descriptor, TensorSpec
from ckptd.snapshot.values import TensorRef

__all__ = ["CheckpointPlan", "FilePlan", "Segment", "SlotRange", "plan_checkpoint"]

SINGLE_SCHEMA: Final = "ckpt.v2"
SHARDED_SCHEMA: Final = "ckpt.v2-sharded"
SHARD_SCHEMA: Final = "ckpt-shard.v2"
TAG_KEY: Final = "__ckptd__"
RNG_COMPONENT: Final = "rng"

#: With shards="auto", a component with fewer tensor bytes stays inside meta.pt.
_AUTO_COMPONENT_FROM_BYTES: Final = 1 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """One file.

    Attributes:
        path: Name inside the checkpoint folder.
        component: Whose tensors it holds; "meta" for meta.pt, "ckpt" for ckpt.pt.
        shard: Number of this file among its component's, from 0.
        num_params: Tensor elements stored in it; what is tied counts once.
        size: Bytes.
        segments: What to write, in order; their lengths add up to size.
    """

    path: str
    component: str
    shard: int
    num_params: int
    size: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPlan:
    """One checkpoint folder, all but its index.

    Attributes:
        layout: "single" (ckpt.pt) or "sharded" (meta.pt and shards).
        files: meta.pt first.
        table: The bytes of tensors.json.
    """

    layout: Literal["single", "sharded"]
    files: tuple[FilePlan, ...]
    table: bytes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A file's plan, and where in it the bytes of tensors begin."""

    file: FilePlan
    offsets: dict[int, int]  #: tensor row → byte in the file


def plan_checkpoint(d: Descriptor, *, cores: int | None = None) -> CheckpointPlan:
    """Plan all files of the snapshot.

    Args:
        d: A descriptor that `descriptor_codec` encodes (or decoded).
        cores: With Sharding(shards="auto"), the least number of files of a large component; None means the
            CPUs this process may use.

    Raises:
        UnstorableState: d holds something else than plain values.
    """
    total = sum(row.nbytes for row in d.tensors if row.alias_of is None)
    if d.sharding.shards == "auto" and total < SINGLE_FILE_BELOW_BYTES:
        payload = {"schema": SINGLE_SCHEMA, **_stamp(d), "step": d.step, **d.state}
        planned = [_plan_file(d, names.SINGLE_FILE, "ckpt", 0, payload, {})]
        return CheckpointPlan(layout="single", files=(planned[0].file,), table=_table(d, planned))
    shards = _shards(d, cores or len(os.sched_getaffinity(0)))
    payload = {"schema": SHARDED_SCHEMA, **_stamp(d), "step": d.step, **d.state}
    planned = [
        _plan_file(d, names.META_FILE, "meta", 0, payload, _tags(d.tensors, shards)),
        *(_plan_shard(d, shard) for shard in shards),
    ]
    files = tuple(each.file for each in planned)
    return CheckpointPlan(layout="sharded", files=files, table=_table(d, planned))


def _stamp(d: Descriptor) -> dict[str, float]:
    return {"wall_saved_at": d.saved_at}


@dataclass(frozen=True, slots=True)
class _Shard:
    """The tensors of one shard."""

    component: str
    number: int
    keys: dict[int, str]  #: tensor row → its key in this shard

    @property
    def path(self) -> str:
        return names.shard_file(self.component, self.number)


def _shards(d: Descriptor, cores: int) -> list[_Shard]:
    shards: list[_Shard] = []
    for component, rows in _components(d.tensors).items():
        nbytes = sum(d.tensors[index].nbytes for index in rows)
        if not nbytes or (d.sharding.shards == "auto" and nbytes < _AUTO_COMPONENT_FROM_BYTES):
            continue
        table = [(i, d.tensors[i].path[1:], d.tensors[i].nbytes, _owner(d.tensors, i)) for i in rows]
        for number, file in enumerate(assign(table, d.sharding, cores=cores)):
            keys = {index: shard_key(d.tensors[index].path[1:]) for index in file}
            shards.append(_Shard(component, number, keys))
    return shards


def _components(rows: Sequence[TensorSpec]) -> dict[str, list[int]]:
    """The tensors of each component that may have shards."""
    components: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        name = row.path[0]
        if names.is_component_with_shards(name) and name != RNG_COMPONENT:
            components.setdefault(name, []).append(index)
    return components


def _owner(rows: Sequence[TensorSpec], index: int) -> int:
    alias_of = rows[index].alias_of
    return index if alias_of is None else alias_of


def _tags(rows: Sequence[TensorSpec], shards: Iterable[_Shard]) -> dict[int, Any]:
    """What stands in meta.pt for each tensor that lies in a shard."""
    return {
        index: {TAG_KEY: "tensor", "file": shard.path, "key": key, **_kind(rows[index])}
        for shard in shards
        for index, key in shard.keys.items()
    }


def _kind(row: TensorSpec) -> dict[str, bool]:
    """What the table doesn't say of a tensor: nothing, for the values of a state_dict()."""
    kind = {"parameter": True} if row.parameter else {}
    return kind | {"requires_grad": True} if row.requires_grad else kind


def _plan_shard(d: Descriptor, shard: _Shard) -> _Planned:
    tensors = {key: TensorRef(index) for index, key in shard.keys.items()}
    payload = {
        "schema": SHARD_SCHEMA, **_stamp(d), "component": shard.component, "shard": shard.number,
        "tensors": tensors, "keys": list(tensors),
    }  # fmt: skip
    return _plan_file(d, shard.path, shard.component, shard.number, payload, {})


def _plan_file(
    d: Descriptor,
    path: str,
    component: str,
    shard: int,
    payload: dict[Any, Any],
    substitutes: Mapping[int, Any],
) -> _Planned:
    archive: ArchivePlan = plan_archive(
        payload, d.tensors, name=path.removesuffix(".pt"), substitutes=substitutes
    )
    owners = {_owner(d.tensors, index) for index in archive.offsets}
    num_params = sum(d.tensors[owner].nbytes // d.tensors[owner].itemsize for owner in owners)
    file = FilePlan(
        path=path, component=component, shard=shard, num_params=num_params,
        size=archive.size, segments=archive.segments,
    )  # fmt: skip
    return _Planned(file, archive.offsets)


def _table(d: Descriptor, planned: Sequence[_Planned]) -> bytes:
    places = {index: (each.file.path, offset) for each in planned for index, offset in each.offsets.items()}
    return tensor_table(d.tensors, places)
