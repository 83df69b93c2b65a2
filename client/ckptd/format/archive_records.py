"""The records of a torch zip archive, found as torch finds them, and refused where it would trust too much.

A hash proves that bytes are those that were committed, not who made them. torch inflates what a record says,
reads where it points, and takes the first or the last of two that have one name. Here every record is stored as
it is, lies inside the file, shares no byte with another and has a name of its own, so that nothing read from the
archive is larger than the archive.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ckptd.errors import CorruptCheckpoint
from ckptd.limits import MAX_TENSORS

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4s4H2IH")
_MAX32: Final = 0xFFFFFFFF
_WIDE_TAG: Final = 1

_ENCRYPTED: Final = 0x0001
_MAX_RECORDS: Final = MAX_TENSORS + 16
#: What torch.save and our writer put beside the data; "constants.pkl" would make it a program.
_NAME: Final = re.compile(
    r"data\.pkl|byteorder|version|\.data/serialization_id|\.format_version|\.storage_alignment|data/[0-9]{1,7}",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Record:
    """Where one record's data lie in the file."""

    offset: int
    nbytes: int


def read_records(data: bytes | memoryview, where: str) -> dict[str, Record]:
    """The records of an archive, by name without the folder that all of them lie in.

    Args:
        data: The whole file.
        where: Its path, for messages.

    Raises:
        CorruptCheckpoint: It is not such an archive, or one that torch shouldn't be given.
    """
    records: dict[str, Record] = {}
    folder = ""
    for text, record in _central(data, where):
        root, _, name = text.partition("/")
        folder = folder or root
        if root != folder or not _NAME.fullmatch(name):
            raise _bad("a record that doesn't belong in it", where, repr(text)[:200])
        if name in records:
            raise _bad("two records have one name", where, repr(text)[:200])
        records[name] = record
    if "data.pkl" not in records:
        raise _bad("no data.pkl in it", where, f"{len(records)} records")
    _check_apart(records, where)
    return records


def first_record(head: bytes | bytearray, where: str) -> memoryview:
    """data.pkl of an archive of ours, in which it comes first, from the bytes before the first tensor's.

    Raises:
        CorruptCheckpoint: It isn't there.
    """
    view = memoryview(head)
    if len(head) >= _LOCAL.size:
        magic, _, flags, method, _, _, _, packed, nbytes, name_length, extra_length = _LOCAL.unpack_from(head)
        at = _LOCAL.size + name_length + extra_length
        named = bytes(view[_LOCAL.size : _LOCAL.size + name_length]).endswith(b"/data.pkl")
        plain = magic == b"PK\3\4" and method == 0 and not flags & _ENCRYPTED and packed == nbytes
        if named and plain and at + nbytes <= len(head):
            return view[at : at + nbytes]
    raise _bad("data.pkl isn't its first record", where, repr(bytes(view[:40])))


def _bad(what: str, where: str, seen: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"not an archive as torch.save makes them: {what}", where=where, seen=seen)


def _check_apart(records: dict[str, Record], where: str) -> None:
    end = 0
    for name, record in sorted(records.items(), key=lambda item: item[1].offset):
        if record.offset < end:
            raise _bad("two records share bytes", where, name)
        end = record.offset + record.nbytes


def _directory_place(data: bytes | memoryview, where: str) -> tuple[int, int, int]:
    """How many records there are, and where their directory begins and ends."""
    end_at = len(data) - _END.size
    if end_at < 0 or data[end_at : end_at + 4] != b"PK\5\6":
        raise _bad("its end is not that of a zip file", where, f"{len(data)} bytes")
    _, _, _, _, count, size, start, _ = _END.unpack_from(data, end_at)
    last = end_at
    locator_at = end_at - _LOCATOR64.size
    if locator_at >= 0 and data[locator_at : locator_at + 4] == b"PK\6\7":
        last = _LOCATOR64.unpack_from(data, locator_at)[2]
        if last + _END64.size != locator_at or data[last : last + 4] != b"PK\6\6":
            raise _bad("its end points elsewhere", where, f"byte {last}")
        *_, count, size, start = _END64.unpack_from(data, last)
    if start + size != last or count > _MAX_RECORDS:
        raise _bad("its directory doesn't lie before its end", where, f"{count} records at byte {start}")
    return count, start, last


def _central(data: bytes | memoryview, where: str) -> Iterator[tuple[str, Record]]:
    count, at, end = _directory_place(data, where)
    for _ in range(count):
        if at + _CENTRAL.size > end or data[at : at + 4] != b"PK\1\2":
            raise _bad("its directory ended early", where, f"byte {at}")
        (_, _, _, flags, method, _, _, _, packed, nbytes, name_length, extra_length, comment_length,
         _, _, _, header_at) = _CENTRAL.unpack_from(data, at)  # fmt: skip
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment_length
        wide = _wide(bytes(data[extra_at : extra_at + extra_length]))
        nbytes, packed, header_at = (
            next(wide, -1) if field == _MAX32 else field for field in (nbytes, packed, header_at)
        )
        name = bytes(data[name_at:extra_at])
        if flags & _ENCRYPTED or method != 0 or packed != nbytes:
            raise _bad("a record is compressed or encrypted", where, repr(name)[:200])
        yield name.decode("latin1"), _record(data, name, header_at, nbytes, where)
    if at != end:
        raise _bad("its directory holds more than its records", where, f"byte {at}")


def _wide(extra: bytes) -> Iterator[int]:
    """The 64-bit fields of a zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, at)
        if tag == _WIDE_TAG and at + 4 + size <= len(extra):
            yield from struct.unpack_from(f"<{size // 8}Q", extra, at + 4)
            return
        at += 4 + size


def _record(data: bytes | memoryview, name: bytes, header_at: int, nbytes: int, where: str) -> Record:
    """The place of a record's data, by its own header, which must agree in name and method."""
    if not 0 <= header_at <= len(data) - _LOCAL.size or data[header_at : header_at + 4] != b"PK\3\4":
        raise _bad("a record lies outside", where, repr(name)[:200])
    _, _, flags, method, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack_from(data, header_at)
    name_at = header_at + _LOCAL.size
    offset = name_at + name_length + extra_length
    if flags & _ENCRYPTED or method != 0 or data[name_at : name_at + name_length] != name:
        raise _bad("a record's two headers disagree", where, repr(name)[:200])
    if not 0 <= nbytes <= len(data) - offset:
        raise _bad("a record lies outside", where, repr(name)[:200])
    return Record(offset, nbytes)
