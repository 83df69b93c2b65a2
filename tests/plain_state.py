"""Descriptors of live tensors for the format tests, and planned files written: no more than those need."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckptd.format.plan import CheckpointPlan, SlotRange
from ckptd.limits import PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT, SMALL_ALIGNMENT
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.values import DeviceValue, DtypeValue, SizeValue, TensorRef


class Snapshot:
    """Tensor rows and their data region. Tensors alike in place and layout are tied."""

    def __init__(self) -> None:
        self.rows: list[TensorSpec] = []
        self.data = bytearray()
        self._keep: list[torch.Tensor] = []
        self._seen: dict[Any, int] = {}

    def add(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> TensorRef:
        detached = tensor.detach()
        stride = tuple(detached.stride()) if dense(detached) and not detached.is_contiguous() else None
        plain = detached if stride is not None else detached.contiguous()
        look = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        owner = self._seen.get(look) if tensor.numel() else None
        raw = b"" if owner is not None else bytes_of(plain)
        offset = self._place(raw) if owner is None else self.rows[owner].offset
        self._keep.append(tensor)
        self.rows.append(
            TensorSpec(
                path=path, dtype=str(tensor.dtype).removeprefix("torch."), itemsize=tensor.element_size(),
                shape=tuple(tensor.shape), stride=stride, offset=offset,
                nbytes=plain.numel() * plain.element_size(), alias_of=owner,
                requires_grad=tensor.requires_grad, parameter=isinstance(tensor, torch.nn.Parameter),
            )
        )  # fmt: skip
        self._seen.setdefault(look, len(self.rows) - 1)
        return TensorRef(len(self.rows) - 1)

    def _place(self, raw: bytes) -> int:
        alignment = PAGE_ALIGNMENT if len(raw) >= PAGE_ALIGNED_FROM_BYTES else SMALL_ALIGNMENT
        self.data += b"\xee" * (-len(self.data) % alignment)
        self.data += raw
        return len(self.data) - len(raw)


def dense(tensor: torch.Tensor) -> bool:
    step = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != step:
            return False
        step *= size
    return True


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a dense tensor in memory order."""
    start, count = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (count,), (1,))
    return bytes(memoryview(flat.numpy()))


def plain(value: Any, snapshot: Snapshot, path: tuple[Any, ...] = ()) -> Any:
    """A live value as ckptd.snapshot.values, its tensors added to snapshot."""
    if isinstance(value, torch.Tensor):
        return snapshot.add(value, path)
    if type(value) is torch.Size:
        return SizeValue(tuple(value))
    if type(value) is torch.dtype:
        return DtypeValue(str(value).removeprefix("torch."))
    if type(value) is torch.device:
        return DeviceValue(str(value))
    if type(value) in (list, tuple):
        return type(value)(plain(item, snapshot, (*path, i)) for i, item in enumerate(value))
    if type(value) is dict:
        return {key: plain(item, snapshot, (*path, key)) for key, item in value.items()}
    if type(value) is OrderedDict:
        result = OrderedDict((key, plain(item, snapshot, (*path, key))) for key, item in value.items())
        if hasattr(value, "_metadata"):
            result._metadata = plain(value._metadata, snapshot, (*path, "_metadata"))
        return result
    return value


def described(
    state: dict[Any, Any], sharding: Sharding | None = None, **fields: Any
) -> tuple[Descriptor, bytes]:
    """A descriptor of a live state, and the data region."""
    snapshot = Snapshot()
    tree = plain(state, snapshot)
    return of_rows(tree, snapshot.rows, len(snapshot.data), sharding, **fields), bytes(snapshot.data)


def of_rows(
    tree: dict[Any, Any],
    rows: list[TensorSpec],
    data_bytes: int,
    sharding: Sharding | None = None,
    **fields: Any,
) -> Descriptor:
    descriptor = Descriptor(
        run="default", client_id="0123456789abcdef" * 2, snapshot=1, step=7, saved_at=1_700_000_000.25,
        run_seconds=12.5, base_sequence=None, state=tree, tensors=tuple(rows), data_bytes=data_bytes,
        sharding=sharding or Sharding(),
    )  # fmt: skip
    return replace(descriptor, **fields)


def write(plan: CheckpointPlan, data: bytes, folder: Path) -> None:
    """Write the files of a plan, checking that the segments add up."""
    folder.mkdir(exist_ok=True)
    for file in plan.files:
        content = joined(file.segments, data)
        assert len(content) == file.size
        (folder / file.path).write_bytes(content)
    (folder / "tensors.json").write_bytes(plan.table)


def joined(segments: tuple[bytes | SlotRange, ...], data: bytes) -> bytes:
    return b"".join(
        part if isinstance(part, bytes) else data[part.offset : part.offset + part.nbytes]
        for part in segments
    )
