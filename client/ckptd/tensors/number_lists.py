"""Lists of numbers, such as a history of losses, in 8 bytes an item."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from ckptd.snapshot.values import PackedNumbers


def pack_numbers(value: list[Any]) -> PackedNumbers | None:
    """The list in 8 bytes an item when it holds only floats, or only ints of 64 bits; else None."""
    kinds = set(map(type, value))
    if kinds == {float}:
        numbers: array[Any] = array("d", value)
    elif kinds == {int}:
        try:
            numbers = array("q", value)
        except OverflowError:
            return None
    else:
        return None
    if sys.byteorder == "big":
        numbers.byteswap()
    return PackedNumbers(numbers.typecode, numbers.tobytes())
