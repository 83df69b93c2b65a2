"""What is told of a snapshot that lies in a slot and isn't written yet, as plain JSON values."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ckptd.limits import MAX_STEP
from ckptd.snapshot.sealed_slot import SealedSlot
from ckptd.snapshot.slot_header import SlotHeader, SlotState

__all__ = ["facts_of", "facts_of_slot"]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of an encoded descriptor; see ckptd.snapshot.descriptor_codec."""

    format: str
    run: str
    client_id: str
    snapshot: int
    step: int
    saved_at: float


_decoder = msgspec.msgpack.Decoder(_Head)


def facts_of(header: SlotHeader, descriptor: bytes | memoryview, *, proven: bool) -> dict[str, Any]:
    """{"snapshot", "client_id", "sequence", "step", "bytes", "since", "state": "staged" | "writing", "proven"}.

    `bytes` are those of the tensors, `since` is when it was taken, in Unix seconds. Step and since are None where the
    descriptor is damaged; it isn't hashed for this.
    """
    step, since = _head(descriptor)
    return {
        "snapshot": header.snapshot, "client_id": header.client_id, "sequence": header.sequence, "step": step,
        "bytes": header.data_bytes, "since": since, "proven": proven,
        "state": "writing" if header.state is SlotState.WRITING else "staged",
    }  # fmt: skip


def facts_of_slot(slot: SealedSlot) -> dict[str, Any]:
    """The same, of an open slot. Raises ProtocolError and OSError when it can't be read."""
    return facts_of(slot.header, slot.descriptor(), proven=slot.is_proven())


def _head(descriptor: bytes | memoryview) -> tuple[int | None, float | None]:
    try:
        head = _decoder.decode(descriptor)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, None
    whole = 0 <= head.step <= MAX_STEP and math.isfinite(head.saved_at)
    return (head.step, head.saved_at) if whole else (None, None)
