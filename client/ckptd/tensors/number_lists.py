# ruff: noqa: TID253
"""Lists of numbers, such as a history of losses, in 8 bytes an item."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy

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


def packed_ints(value: Sequence[int]) -> PackedNumbers:
    """The same of what holds nothing but ints of 64 bits."""
    return PackedNumbers("q", struct.pack(f"<{len(value)}q", *value))


def packed_array(value: numpy.ndarray) -> PackedNumbers:
    """The same of an array of ints that fit into 64 bits."""
    return PackedNumbers("q", value.astype("<i8").tobytes())
