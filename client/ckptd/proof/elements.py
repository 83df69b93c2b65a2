"""How far two tensors' bytes are apart: elements that differ, and the largest difference. Pure; no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Final

#: dtype → struct's letter; bfloat16 is read as the upper half of a float32. Others are only counted.
_LETTERS: Final = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "bool": "?",
}  # fmt: skip
_BLOCK: Final = 4096
_MAX_BYTES: Final = 16 * 1024 * 1024


def apart(dtype: str, itemsize: int, seen: bytes, wanted: bytes) -> str:
    """`3 of 12 elements differ, by at most 0.25`; "" when they can't be compared element by element.

    Args:
        dtype: torch's name without the prefix.
        itemsize: Bytes of an element, 1 or more.
        seen, wanted: Elements in this machine's byte order; the first 16 MiB are looked at.
    """
    if len(seen) != len(wanted) or itemsize < 1 or len(seen) % itemsize:
        return ""
    whole = len(seen) // itemsize
    end = min(len(seen), _MAX_BYTES)
    differing, largest = 0, 0.0
    for one, other in _pairs(itemsize, seen[:end], wanted[:end]):
        differing += 1
        largest = _larger(largest, _distance(dtype, one, other))
    count = f"{differing} of {whole if end == len(seen) else f'the first {end // itemsize}'} elements differ"
    if dtype == "bool" or (dtype != "bfloat16" and dtype not in _LETTERS):
        return count
    return f"{count}, by at most {largest!r}" if math.isfinite(largest) else f"{count}, one is not finite"


def _pairs(itemsize: int, seen: bytes, wanted: bytes) -> Iterator[tuple[bytes, bytes]]:
    block = _BLOCK * itemsize
    for start in range(0, len(seen), block):
        one, other = seen[start : start + block], wanted[start : start + block]
        if one == other:
            continue
        for at in range(0, len(one), itemsize):
            a, b = one[at : at + itemsize], other[at : at + itemsize]
            if a != b:
                yield a, b


def _distance(dtype: str, seen: bytes, wanted: bytes) -> float:
    a, b = number(dtype, seen), number(dtype, wanted)
    if a is None or b is None:
        return 0.0
    return float(abs(a - b))


def number(dtype: str, data: bytes | memoryview) -> float | int | None:
    """The value of one element; None for a dtype that isn't a plain number here."""
    if dtype == "bfloat16":
        dtype, data = "float32", b"\0\0" + bytes(data)
    letter = _LETTERS.get(dtype)
    if letter is None or len(data) != struct.calcsize(letter):
        return None
    value: float | int = struct.unpack(f"={letter}", data)[0]
    return value


def _larger(largest: float, distance: float) -> float:
    return largest if math.isnan(largest) else distance if math.isnan(distance) else max(largest, distance)
