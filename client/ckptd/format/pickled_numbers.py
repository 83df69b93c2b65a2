"""The items of a packed list as pickle opcodes, without a Python loop per number."""

from __future__ import annotations

from array import array

from ckptd.snapshot.tree_columns import little_endian
from ckptd.snapshot.values import PackedNumbers


def packed_items(value: PackedNumbers) -> bytes:
    """One opcode per number, in order: BINFLOAT, BININT or LONG1. Strided copies put the bytes in place."""
    return _floats(value.data) if value.typecode == "d" else _ints(value.data)


def _floats(data: bytes) -> bytes:
    count = len(data) // 8
    out = bytearray(9 * count)
    out[0::9] = b"G" * count
    for byte in range(8):
        out[1 + byte :: 9] = data[7 - byte :: 8]  # BINFLOAT is big-endian
    return bytes(out)


def _ints(data: bytes) -> bytes:
    values = little_endian(array("q", data))
    if min(values) >= -(2**31) and max(values) < 2**31:
        opcode, kept = b"J", 4  # BININT
    else:
        opcode, kept = b"\x8a\x08", 8  # LONG1 of eight bytes
    width = len(opcode) + kept
    out = bytearray(width * len(values))
    for at, byte in enumerate(opcode):
        out[at::width] = bytes((byte,)) * len(values)
    for byte in range(kept):
        out[len(opcode) + byte :: width] = data[byte::8]
    return bytes(out)
