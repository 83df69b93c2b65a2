"""A plain tree (ckptd.snapshot.values) in flat columns: the form in which it lies in a descriptor.

The tree is one stream of one-byte opcodes in the order of a walk; what an opcode needs comes from a column of
its own kind. Nothing nests in the bytes, so no length in them can ask for memory that the bytes don't have.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from ckptd.snapshot.values import DeviceValue, DtypeValue, SizeValue, TensorRef

#: What one LONG1 of a protocol-2 pickle holds; torch's weights_only loader knows no longer integer.
MAX_INT_BYTES: Final = 255


def signed_bytes(value: int) -> int:
    """How many bytes the shortest two's complement form of value has."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


class Op(IntEnum):
    """What a node is, and what it takes from the columns."""

    NONE = 0
    TRUE = 1
    FALSE = 2
    INT = 3  #: one of ints
    BIG = 4  #: a blob: little-endian, signed
    FLOAT = 5  #: one of floats
    COMPLEX = 6  #: two of floats
    STR = 7  #: a string
    BYTES = 8  #: a blob
    REF = 9  #: one of ints: tensor row
    SIZE = 10  #: of ints: how many, then the dimensions
    DTYPE = 11  #: a string
    DEVICE = 12  #: a string
    DOUBLES = 13  #: a blob: PackedNumbers "d"
    INTS = 14  #: a blob: PackedNumbers "q"
    # These take one of ints, their length, and that many nodes (NAMES: strings).
    LIST = 32
    TUPLE = 33
    NAMES = 34  #: a tuple of strings only
    SET = 35
    # These take a node with their keys, a tuple, and one node per value.
    DICT = 36
    ODICT = 37
    ODICT_META = 38  #: with the node of its _metadata first


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """A tree in flat form. Numbers are little-endian, 8 bytes each.

    Attributes:
        ops: One opcode per node.
        ints: Integers, container lengths, string numbers and tensor rows, in the order they are needed.
        floats: Doubles.
        string_lengths: Characters of each distinct string.
        text: All distinct strings in a row, UTF-8.
        blob_lengths: Bytes of each bytes object, big integer or packed list.
        blobs: All of those in a row.
    """

    ops: bytes
    ints: bytes
    floats: bytes
    string_lengths: bytes
    text: bytes
    blob_lengths: bytes
    blobs: bytes


def little_endian(numbers: array[Any]) -> array[Any]:
    """numbers, byte-swapped where the machine is big-endian."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


_ELEMENTS = frozenset(
    {str, int, bool, float, type(None), bytes, complex, TensorRef, SizeValue, DtypeValue, DeviceValue}
)


def is_element(value: object) -> bool:
    """Whether value may be in a set: it is hashable, and still is when read back from a file."""
    if type(value) is tuple:
        return all(map(is_element, value))
    return type(value) in _ELEMENTS
