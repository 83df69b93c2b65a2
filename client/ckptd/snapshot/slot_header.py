"""The header of a slot: its fields, and their packing with a counter and a CRC.

A slot keeps two copies of it; see ckptd.snapshot.slots.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from ckptd.errors import CkptdError
from ckptd.limits import MAX_DESCRIPTOR_BYTES, PAGE_ALIGNMENT
from ckptd.names import check_run_name

_MAGIC: Final = b"ckptslot"
_VERSION: Final = 1
_FIELDS: Final = struct.Struct(
    "<8sII"  # magic, version, state
    "QQQQQQ"  # counter, generation, snapshot, sequence, data bytes, descriptor bytes
    "QQ"  # owner's pid and start time
    "16s32s64s"  # client, descriptor's sha256, run
)
_CRC: Final = struct.Struct("<I")
_NO_CLIENT: Final = bytes(16)

COPIES: Final = (0, PAGE_ALIGNMENT // 2)  #: where in page 0 the two copies begin
MAX_NUMBER: Final = 2**63 - 1  #: of every number in a header; one more still fits its field
PACKED_BYTES: Final = _FIELDS.size + _CRC.size  #: length of one copy
COPIES_END: Final = COPIES[-1] + PACKED_BYTES  #: behind the later one


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    SEALED = 2
    WRITING = 3


_STATES: Final = {int(state): state for state in SlotState}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotHeader:
    """What a slot says about itself.

    Attributes:
        state: Whose turn it is; see the module's text.
        generation: How often the slot has been filled; a push names it, so a stale one is recognised.
        client_id: 32 hex digits of the client that filled it last, or that it was made for.
        run: Its run.
        snapshot: The client's number of the snapshot, 0 in one never filled.
        sequence: Given by the daemon before writing; 0 until then.
        data_bytes: Length of the tensors' bytes, once sealed.
        descriptor_bytes: Length of the encoded descriptor, once sealed.
        descriptor_sha256: Its hash, 64 hex digits.
        owner_pid: Process the slot was made for; 0 once it has left. A restarted daemon keeps the slots of
            processes that live.
        owner_started: Its start time (field 22 of /proc/PID/stat).
    """

    state: SlotState
    generation: int = 0
    client_id: str = ""
    run: str = ""
    snapshot: int = 0
    sequence: int = 0
    data_bytes: int = 0
    descriptor_bytes: int = 0
    descriptor_sha256: str = "00" * 32
    owner_pid: int = 0
    owner_started: int = 0


def pack(counter: int, header: SlotHeader) -> bytes:
    """One copy. `counter` says which of two copies is the newer one."""
    raw = _FIELDS.pack(
        _MAGIC, _VERSION, header.state,
        counter, header.generation, header.snapshot, header.sequence,
        header.data_bytes, header.descriptor_bytes, header.owner_pid, header.owner_started,
        bytes.fromhex(header.client_id) or _NO_CLIENT,
        bytes.fromhex(header.descriptor_sha256), header.run.encode("ascii"),
    )  # fmt: skip
    return raw + _CRC.pack(zlib.crc32(raw))


def unpack(raw: bytes) -> tuple[int, SlotHeader] | None:
    """(counter, header) of one copy; None when it isn't whole or says something impossible in itself."""
    if _CRC.unpack_from(raw, _FIELDS.size)[0] != zlib.crc32(raw[: _FIELDS.size]):
        return None
    magic, version, state, counter, *numbers, client, sha256, run = _FIELDS.unpack_from(raw)
    generation, snapshot, sequence, data_bytes, descriptor_bytes, owner_pid, owner_started = numbers
    name = _run_name(run)
    if max(counter, *numbers) > MAX_NUMBER:
        return None
    if magic != _MAGIC or version != _VERSION or name is None or descriptor_bytes > MAX_DESCRIPTOR_BYTES:
        return None
    known = _STATES.get(state)
    if known is None:
        return None
    client_id = "" if client == _NO_CLIENT else client.hex()
    return counter, SlotHeader(
        state=known, generation=generation, client_id=client_id, run=name,
        snapshot=snapshot, sequence=sequence,
        data_bytes=data_bytes, descriptor_bytes=descriptor_bytes, descriptor_sha256=sha256.hex(),
        owner_pid=owner_pid, owner_started=owner_started,
    )  # fmt: skip


def newest(
    page: bytes | memoryview, fits: Callable[[SlotHeader], bool]
) -> tuple[int, int, SlotHeader] | None:
    """(counter, start, header) of the newer whole copy in page 0; None when neither is whole and fits."""
    copies = [(bytes(page[start : start + PACKED_BYTES]), start) for start in COPIES]
    for raw, start in sorted(copies, key=_counter, reverse=True):
        whole = unpack(raw)
        if whole is not None and fits(whole[1]):
            return whole[0], start, whole[1]
    return None


def _counter(copy: tuple[bytes, int]) -> int:
    """What a copy says, whole or not: the one that says more is looked at first."""
    return int(_FIELDS.unpack_from(copy[0])[3])


def _run_name(raw: bytes) -> str | None:
    try:
        name = raw.rstrip(b"\0").decode("ascii")
        return check_run_name(name) if name else ""
    except (UnicodeDecodeError, CkptdError):
        return None
