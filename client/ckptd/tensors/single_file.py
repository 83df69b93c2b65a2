# ruff: noqa: TID253
"""The one file of a small checkpoint, in memory and proven: its large tensors are copied once, to where they are wanted.

torch makes the tensors, but gets the bytes of small ones only. Where it would read a large one, memory is left
untouched but for a mark at its beginning, which says afterwards whose it is; untouched memory costs nothing.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy
import torch

from ckptd.disk.reader import Reader, Span
from ckptd.format.archive_records import Record
from ckptd.limits import PAGE_ALIGNED_FROM_BYTES
from ckptd.names import SINGLE_FILE
from ckptd.tensors.flat import as_bytes, flat
from ckptd.tensors.ties_across_files import tensors_in

_LARGE_FROM_BYTES: Final = PAGE_ALIGNED_FROM_BYTES
_MARK_BYTES: Final = 8


def read_whole(reader: Reader) -> memoryview:
    """All bytes of ckpt.pt, their hash checked. Raises CorruptCheckpoint, ReadFailed."""
    size = next(shard.bytes for shard in reader.index.shards if shard.path == SINGLE_FILE)
    content = memoryview(numpy.empty(size, numpy.uint8).data).cast(
        "B"
    )  # in large pages, where the system has some
    reader.read_into(SINGLE_FILE, [Span(0, content)])
    return content


class SparseFile(io.RawIOBase):
    """A file for torch.load, which finds a mark in place of each large tensor.

    Args:
        content: The archive.
        records: Its records by name.
    """

    def __init__(self, content: memoryview, records: Mapping[str, Record]) -> None:
        super().__init__()
        self._content, self._at = content, 0
        self._large = {
            record.offset: record.nbytes
            for name, record in records.items()
            if name.startswith("data/") and record.nbytes >= _LARGE_FROM_BYTES
        }

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.nbytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        into, at = memoryview(buffer).cast("B"), self._at
        count = max(0, min(into.nbytes, self._content.nbytes - at))
        if self._large.get(at) == count:
            into[:_MARK_BYTES] = at.to_bytes(_MARK_BYTES, "little")
        else:
            into[:count] = self._content[at : at + count]
        self._at += count
        return count

    def large_tensors(self, payload: Mapping[str, Any]) -> list[LargeTensors] | None:
        """Those that the components still lack the bytes of; None if it isn't sure of each whose bytes it lacks.

        Args:
            payload: What torch.load gave of this file, by component.
        """
        offsets: dict[int, int] = {}
        found: list[LargeTensors] = []
        for name, value in payload.items():
            places = {}
            for tensor in _large(value):
                offset = int.from_bytes(as_bytes(tensor)[:_MARK_BYTES], "little")
                if self._large.get(offset) != tensor.nbytes:
                    return None
                if offsets.setdefault(tensor.data_ptr(), offset) != offset:
                    return None
                places[tensor.data_ptr()] = (flat(tensor), offset)
            if places:
                found.append(LargeTensors(name, self._content, places))
        return found if sorted(offsets.values()) == sorted(self._large) else None


class LargeTensors:
    """One component's tensors of a file that is in memory and proven.

    Attributes:
        name: Of the component.
        memory: The bytes of each tensor by their address, those of tied ones once.
    """

    def __init__(
        self, name: str, content: memoryview, places: Mapping[int, tuple[torch.Tensor, int]]
    ) -> None:
        self.name, self._content = name, content
        self.memory = {address: memory for address, (memory, _) in places.items()}
        self._offsets = {address: offset for address, (_, offset) in places.items()}

    def without(self, addresses: Collection[int]) -> LargeTensors:
        """Those that don't lie at these addresses."""
        kept = {
            address: (memory, self._offsets[address])
            for address, memory in self.memory.items()
            if address not in addresses
        }
        return LargeTensors(self.name, self._content, kept)

    def read(self, live: Mapping[int, torch.Tensor]) -> None:
        """Copy them to where they belong.

        Args:
            live: Address of some of the memory → a dense tensor that gets its bytes instead.
        """
        for address, memory in self.memory.items():
            self._copy(self._offsets[address], live.get(address, memory))

    def prove(self) -> None:
        """They are."""

    def peek(self, addresses: Collection[int]) -> None:
        """Copy those at these addresses into their own memory."""
        for address in self.memory.keys() & addresses:
            self._copy(self._offsets[address], self.memory[address])

    def _copy(self, offset: int, into: torch.Tensor) -> None:
        source = numpy.frombuffer(self._content, numpy.uint8, into.nbytes, offset)
        if (
            into.device.type == "cpu"
        ):  # several threads do it at once: torch would start more for each of them
            numpy.copyto(flat(into).numpy(), source)
        else:
            flat(into).copy_(torch.from_numpy(source))


def _large(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.nbytes >= _LARGE_FROM_BYTES)
