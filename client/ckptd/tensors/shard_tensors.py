# ruff: noqa: TID253
"""The tensors of one shard file: memory for each, laid out by the table, to be filled by one read."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckptd.disk.reader import Span
from ckptd.errors import CorruptCheckpoint, UnsupportedTorch
from ckptd.format.sharding import shard_key
from ckptd.format.table_rows import TensorRow
from ckptd.snapshot import keypath
from ckptd.tensors.torch_support import DTYPE_BY_NAME


class ShardTensors:
    """Empty tensors for the rows of one file; tied rows share their memory.

    Attributes:
        tensors: By shard key. Their values are only right after the spans were filled and the hash agreed.
        spans: Where in the file each one's bytes lie, ascending.
    """

    def __init__(self, rows: Iterable[TensorRow], where: str) -> None:
        """Allocate.

        Raises:
            CorruptCheckpoint: Rows overlap, or a shape and its bytes disagree.
            UnsupportedTorch: A dtype that the installed torch doesn't have.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        memory: dict[tuple[int, int], torch.Tensor] = {}
        for row in rows:
            place = (row.offset, row.bytes)
            if row.bytes == 0 or place not in memory:
                memory[place] = torch.empty(row.bytes, dtype=torch.uint8, device="cpu")
            self.tensors[shard_key(row.key[1:])] = _shaped(memory[place], row, where)
        self.spans = [
            Span(offset, memoryview(memory[offset, size].numpy().data))
            for offset, size in sorted(memory)
            if size
        ]
        for before, after in zip(self.spans, self.spans[1:], strict=False):
            if before.offset + before.into.nbytes > after.offset:
                raise CorruptCheckpoint("two tensors overlap", where=where, seen=f"at byte {after.offset}")


def _shaped(memory: torch.Tensor, row: TensorRow, where: str) -> torch.Tensor:
    dtype = DTYPE_BY_NAME.get(row.dtype)
    if dtype is None:
        raise UnsupportedTorch(
            "this torch has no such dtype",
            where=f"{where}: {keypath.show(row.key)}",
            seen=row.dtype,
            todo="install a newer torch",
        )
    count = 1
    for size in row.shape:
        count *= size
    reach = sum((size - 1) * stride for size, stride in zip(row.shape, row.stride or (), strict=False))
    if count * dtype.itemsize != row.bytes or (count and reach >= count):
        raise CorruptCheckpoint(
            "a shape doesn't fit its bytes",
            where=f"{where}: {keypath.show(row.key)}",
            seen=f"{row.dtype} {row.shape} stride {row.stride}",
            wanted=f"{row.bytes} bytes",
        )
    elements = memory.view(dtype)
    return elements.view(row.shape) if row.stride is None else elements.as_strided(row.shape, row.stride)
