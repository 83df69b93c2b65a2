"""The zip container of torch.save, planned before its first byte is written. Pure: no I/O, no torch.

Records lie uncompressed one after the other, as torch.save puts them; the padding that aligns their data
hides in the extra field of their local headers, as there. What differs from torch.save, on purpose:

* Tensors of 64 KiB and more begin at a multiple of 4096, smaller ones at a multiple of 64.
* Sizes are in the local headers, so that no data descriptors follow the data, and the CRC of tensor records
  is 0: their check is the SHA-256 of the file. torch doesn't read it; other zip tools report it.
* There is no `.format_version` record: with one, torch may compute offsets that hold only in its own layout.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from ckptd.format.pickle_emit import emit
from ckptd.limits import PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT, SMALL_ALIGNMENT
from ckptd.snapshot.descriptor import TensorSpec


@dataclass(frozen=True, slots=True)
class SlotRange:
    """`nbytes` bytes of the snapshot's data region, from `offset` on."""

    offset: int
    nbytes: int


Segment: TypeAlias = bytes | SlotRange


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivePlan:
    """One archive.

    Attributes:
        segments: What to write, in order.
        size: Bytes of the whole file.
        offsets: Tensor row → byte in the file at which its data begin.
    """

    segments: tuple[Segment, ...]
    size: int
    offsets: dict[int, int]


def plan_archive(
    value: Any, rows: Sequence[TensorSpec], *, name: str, substitutes: Mapping[int, Any] | None = None
) -> ArchivePlan:
    """Plan the file that `torch.load(path, weights_only=True)` reads value from.

    Args:
        value: A plain tree; the tensors that it refers to are in the file.
        rows: What TensorRef.index points to.
        name: The folder all records lie in; torch.save takes the file's name without its suffix.
        substitutes: Tensor row → the plain tree to put in its place; those tensors aren't in the file.
    """
    emitted = emit(value, rows, substitutes or {})
    archive = _Archive(name)
    archive.add_bytes("data.pkl", emitted.data)
    archive.add_bytes("byteorder", sys.byteorder.encode())
    owner_offsets: dict[int, int] = {}
    for number, index in enumerate(emitted.storages):
        row = rows[index]
        owner_offsets[index] = archive.add_range(f"data/{number}", SlotRange(row.offset, row.nbytes))
    archive.add_bytes("version", b"3\n")
    archive.add_bytes(".data/serialization_id", _serialization_id(emitted.data))
    archive.finish()
    return ArchivePlan(
        segments=tuple(archive.segments),
        size=archive.at,
        offsets={index: owner_offsets[owner] for index, owner in emitted.tensors.items()},
    )


def _serialization_id(pickle: bytes) -> bytes:
    # torch's is 40 digits made of hashes over the records; any 40 digits do.
    digest = hashlib.sha256(pickle).digest()
    halves = (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))
    return "".join(f"{half:020d}" for half in halves).encode()


_MAX32: Final = 0xFFFFFFFF
_MAX16: Final = 0xFFFF
_UTF8_NAME: Final = 0x0800
_ZIP64_VERSION: Final = 45
_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4s4H2IH")


class _Archive:
    """Lays records out, and keeps the central directory that comes after them."""

    def __init__(self, name: str) -> None:
        self.segments: list[Segment] = []
        self.at = 0
        self._folder = name.encode()
        self._central = bytearray()
        self._records = 0

    def add_bytes(self, record: str, data: bytes) -> int:
        offset = self._begin(record, len(data), zlib.crc32(data))
        self._put(data)
        return offset

    def add_range(self, record: str, data: SlotRange) -> int:
        offset = self._begin(record, data.nbytes, 0)
        if data.nbytes:
            self.segments.append(data)
            self.at += data.nbytes
        return offset

    def _put(self, data: bytes) -> None:
        self.segments.append(data)
        self.at += len(data)

    def _begin(self, record: str, nbytes: int, crc: int) -> int:
        """Put the header of a record and return where its data begin."""
        name = self._folder + b"/" + record.encode()
        header_at = self.at
        big = nbytes >= _MAX32
        zip64 = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if big else b""
        size32 = _MAX32 if big else nbytes
        before_padding = header_at + _LOCAL.size + len(name) + len(zip64)
        extra = zip64 + _padding(before_padding, nbytes)
        version = _ZIP64_VERSION if big else 0
        self._put(
            _LOCAL.pack(b"PK\3\4", version, _UTF8_NAME, 0, 0, 0, crc, size32, size32, len(name), len(extra))
            + name
            + extra
        )
        self._add_central(name, nbytes, crc, header_at)
        return self.at

    def _add_central(self, name: bytes, nbytes: int, crc: int, header_at: int) -> None:
        wide = [nbytes, nbytes] if nbytes >= _MAX32 else []
        wide += [header_at] if header_at >= _MAX32 else []
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size32 = min(nbytes, _MAX32)
        version = _ZIP64_VERSION if wide else 0
        self._central += _CENTRAL.pack(
            b"PK\1\2", version, version, _UTF8_NAME, 0, 0, 0, crc, size32, size32,
            len(name), len(extra), 0, 0, 0, 0, min(header_at, _MAX32),
        )  # fmt: skip
        self._central += name + extra
        self._records += 1

    def finish(self) -> None:
        """Put the central directory and its ends; like torch.save, always the wide one too."""
        start, size, count = self.at, len(self._central), self._records
        self._put(bytes(self._central))
        end64_at = self.at
        self._put(
            _END64.pack(
                b"PK\6\6", _END64.size - 12, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, count, count, size, start
            )
            + _LOCATOR64.pack(b"PK\6\7", 0, end64_at, 1)
            + _END.pack(
                b"PK\5\6",
                0,
                0,
                min(count, _MAX16),
                min(count, _MAX16),
                min(size, _MAX32),
                min(start, _MAX32),
                0,
            )
        )


def _padding(at: int, nbytes: int) -> bytes:
    """The extra field ("FB" and filler, as torch.save's) that aligns data which would else begin at `at`."""
    alignment = PAGE_ALIGNMENT if nbytes >= PAGE_ALIGNED_FROM_BYTES else SMALL_ALIGNMENT
    filler = -(at + 4) % alignment
    return b"FB" + struct.pack("<H", filler) + b"Z" * filler
