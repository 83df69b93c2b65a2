# ruff: noqa: TID253
"""The tensors of one shard file: memory for each, laid out by the table, to be filled by one read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from ckptd.disk.reader import Reader, Span
from ckptd.errors import CorruptCheckpoint, UnsupportedTorch
from ckptd.format.archive_check import check_head
from ckptd.format.sharding import shard_key
from ckptd.format.table_rows import TensorRow
from ckptd.limits import MAX_TABLE_BYTES
from ckptd.snapshot import keypath
from ckptd.tensors.flat import as_bytes
from ckptd.tensors.through_host import ThroughHost
from ckptd.tensors.torch_support import DTYPE_BY_NAME


class ShardTensors:
    """Empty tensors for the rows of one file; tied rows share their memory.

    Attributes:
        name: Of the file.
        tensors: By shard key. Their values are only right after `read`, and not where that put them elsewhere.
        memory: The bytes of each tensor by their address, those of tied ones once; in the order of the file.
    """

    def __init__(
        self, reader: Reader, name: str, nbytes: int, rows: Iterable[TensorRow],
        memory_at: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Make the memory, which takes none before something is written into it.

        Args:
            reader: Has the file.
            name: Of the file.
            nbytes: Its size.
            rows: The rows of the table that are in it.
            memory_at: Offset and size in the file → the bytes there, which are never read then; None: memory is made.

        Raises:
            CorruptCheckpoint: Rows overlap, or a shape and its bytes disagree.
            UnsupportedTorch: A dtype that the installed torch doesn't have.
        """
        self.name = name
        self._reader, self._where = reader, f"{reader.path}/{name}"
        self.tensors: dict[str, torch.Tensor] = {}
        places: dict[tuple[int, int], torch.Tensor] = {}
        for row in rows:
            place = (row.offset, row.bytes)
            if row.bytes == 0 or place not in places:
                places[place] = (memory_at or _new)(*place)
            self.tensors[shard_key(row.key[1:])] = _shaped(places[place], row, self._where)
        filled = sorted((place, memory) for place, memory in places.items() if place[1])
        self.memory = {memory.data_ptr(): memory for _, memory in filled}
        self._offsets = [offset for (offset, _), _ in filled]
        ends = [offset + size for (offset, size), _ in filled]
        for end, start in zip(ends, self._offsets[1:], strict=False):
            if end > start:
                raise CorruptCheckpoint("two tensors overlap", where=self._where, seen=f"at byte {start}")
        # A shard of empty tensors only has no data: all of it is head.
        self._head_bytes = self._offsets[0] if filled else min(nbytes, MAX_TABLE_BYTES)

    def read(self, live: Mapping[int, torch.Tensor] | None = None) -> None:
        """Read and prove the file.

        Args:
            live: Address of some of the memory → a dense tensor that gets its bytes instead.

        Raises:
            CorruptCheckpoint, ReadFailed: What was written anywhere must not be used.
        """
        head, hosts = bytearray(self._head_bytes), dict[torch.device, ThroughHost]()
        spans = [Span(0, memoryview(head))] if head else []
        for offset, (address, memory) in zip(self._offsets, self.memory.items(), strict=True):
            into = (live or {}).get(address, memory)
            if into.device.type == "cpu":
                spans.append(Span(offset, as_bytes(into)))
            else:
                host = hosts.setdefault(into.device, ThroughHost(into.device))
                spans += host.spans(offset, into)
        try:
            self._reader.read_into(self.name, spans)
        finally:
            for host in hosts.values():
                host.finish()
        check_head(head, self._where)

    def prove(self) -> None:
        """Check the file's hash, and keep nothing. Raises as `read`."""
        self._reader.read_into(self.name, [])

    def peek(self, addresses: Collection[int]) -> None:
        """Read some of the memory, unproven. Raises as `read`."""
        spans = [
            Span(offset, as_bytes(memory))
            for offset, (address, memory) in zip(self._offsets, self.memory.items(), strict=True)
            if address in addresses
        ]
        self._reader.peek_into(self.name, spans)


def _new(offset: int, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


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
    if count * dtype.itemsize != row.bytes or (count and (reach >= count or row.offset % dtype.itemsize)):
        raise CorruptCheckpoint(
            "a shape doesn't fit its bytes",
            where=f"{where}: {keypath.show(row.key)}",
            seen=f"{row.dtype} {row.shape} stride {row.stride}",
            wanted=f"{row.bytes} bytes at a multiple of their size",
        )
    elements = memory.view(dtype)
    return elements.view(row.shape) if row.stride is None else elements.as_strided(row.shape, row.stride)
