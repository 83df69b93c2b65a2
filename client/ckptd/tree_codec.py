"""A plain tree (ckptd.values) as flat columns, and back: exact in value and type, safe against hostile bytes.

The tree is one stream of one-byte opcodes in the order of a walk; what an opcode needs comes from a column of
its own kind. Nothing nests in the bytes, so no length in them can ask for memory that the bytes don't have.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from ckptd import keypath
from ckptd.errors import ProtocolError, UnstorableState
from ckptd.limits import MAX_TREE_DEPTH, MAX_TREE_NODES
from ckptd.values import DeviceValue, DtypeValue, PackedNumbers, SizeValue, TensorRef

(
    _NONE,
    _TRUE,
    _FALSE,
    _INT,
    _BIG,
    _FLOAT,
    _COMPLEX,
    _STR,
    _BYTES,
    _REF,
    _SIZE,
    _DTYPE,
    _DEVICE,
    _DOUBLES,
    _INTS,
) = range(15)
(_LIST, _TUPLE, _SET, _DICT, _ODICT, _ODICT_META) = range(32, 38)

#: What one LONG1 of a protocol-2 pickle holds; torch's weights_only loader knows no longer integer.
MAX_INT_BYTES: Final = 255


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
    """Whether value may be in a set: it is hashable, and still is once it was written to a file and read back."""
    if type(value) is tuple:
        return all(map(is_element, value))
    return type(value) in _ELEMENTS


class _Unstorable(Exception):
    """Carries the reason up the walk, which adds the keys it passes, innermost first."""

    def __init__(self, what: str, seen: str) -> None:
        super().__init__(what)
        self.what, self.seen = what, seen
        self.keys: list[Any] = []


class TreeWriter:
    """Collects trees into columns; a reader gets them back in the same order."""

    def __init__(self) -> None:
        self._ops = bytearray()
        self._ints: list[int] = []
        self._floats = array("d")
        self._strings: dict[str, int] = {}
        self._blobs: list[bytes] = []

    def write(self, value: Any, *, where: keypath.Path = ()) -> None:
        """Append one tree.

        Raises:
            UnstorableState: A leaf has no exact form; the error names its key path, which begins with `where`.
        """
        try:
            self._value(value, 0)
        except _Unstorable as error:
            path = (*where, *reversed(error.keys))
            raise UnstorableState(error.what, where=keypath.show(path), seen=error.seen) from None
        if len(self._ops) > MAX_TREE_NODES:
            raise UnstorableState(
                "too many values", where="state", seen=str(len(self._ops)), wanted=f"at most {MAX_TREE_NODES}"
            )

    def columns(self) -> Columns:
        return Columns(
            ops=bytes(self._ops),
            ints=little_endian(array("q", self._ints)).tobytes(),
            floats=little_endian(self._floats).tobytes(),
            string_lengths=little_endian(array("q", map(len, self._strings))).tobytes(),
            text="".join(self._strings).encode(),
            blob_lengths=little_endian(array("q", map(len, self._blobs))).tobytes(),
            blobs=b"".join(self._blobs),
        )

    def _value(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is str:
            self._ops.append(_STR)
            self._ints.append(self._string(value))
        elif kind is TensorRef:
            self._ops.append(_REF)
            self._ints.append(self._number(value.index))
        elif kind is int:
            self._int(value)
        elif kind is float:
            self._ops.append(_FLOAT)
            self._floats.append(value)
        elif kind is bool:
            self._ops.append(_TRUE if value else _FALSE)
        elif value is None:
            self._ops.append(_NONE)
        elif kind is dict or kind is OrderedDict:
            self._dict(value, depth + 1)
        elif kind is list:
            self._sequence(_LIST, value, depth + 1)
        elif kind is tuple:
            self._sequence(_TUPLE, value, depth + 1)
        else:
            self._rare(value, kind, depth)

    def _rare(self, value: Any, kind: type, depth: int) -> None:
        if kind is set:
            self._set(value, depth + 1)
        elif kind is bytes:
            self._blob(_BYTES, value)
        elif kind is complex:
            self._ops.append(_COMPLEX)
            self._floats.extend((value.real, value.imag))
        elif kind is SizeValue:
            self._ops.append(_SIZE)
            self._ints.append(len(value.dims))
            self._ints.extend(map(self._number, value.dims))
        elif kind is DtypeValue or kind is DeviceValue:
            self._ops.append(_DTYPE if kind is DtypeValue else _DEVICE)
            self._ints.append(self._string(value.name))
        elif kind is PackedNumbers:
            self._packed(value)
        else:
            raise _Unstorable("this type can't be stored", f"{kind.__module__}.{kind.__qualname__}")

    def _packed(self, value: PackedNumbers) -> None:
        if value.typecode not in ("d", "q") or type(value.data) is not bytes or len(value.data) % 8:
            raise _Unstorable("not a packed list", f"{value.typecode!r}, {len(value.data)} bytes")
        self._blob(_DOUBLES if value.typecode == "d" else _INTS, value.data)

    def _int(self, value: int) -> None:
        if -(2**63) <= value < 2**63:
            self._ops.append(_INT)
            self._ints.append(value)
            return
        size = value.bit_length() // 8 + 1
        if size > MAX_INT_BYTES:
            raise _Unstorable("integer too long", f"{size} bytes, at most {MAX_INT_BYTES} can be read back")
        self._blob(_BIG, value.to_bytes(size, "little", signed=True))

    def _number(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            raise _Unstorable("not a row or dimension", repr(value)[:200])
        return value

    def _string(self, value: Any) -> int:
        number = self._strings.get(value)
        if number is None:
            if type(value) is not str:
                raise _Unstorable("not a string", repr(value)[:200])
            if not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise _Unstorable("string isn't valid Unicode text", ascii(value)[:200]) from None
            number = self._strings[value] = len(self._strings)
        return number

    def _blob(self, op: int, data: bytes) -> None:
        self._ops.append(op)
        self._blobs.append(data)

    def _sequence(self, op: int, items: Sequence[Any], depth: int) -> None:
        self._open(op, len(items), depth)
        index = 0
        try:
            for item in items:
                self._value(item, depth)
                index += 1
        except _Unstorable as error:
            error.keys.append(index)
            raise

    def _set(self, items: set[Any], depth: int) -> None:
        for item in items:
            if not is_element(item):
                raise _Unstorable(
                    "this type can't be in a set", f"{type(item).__module__}.{type(item).__qualname__}"
                )
        self._sequence(_SET, sorted(items, key=repr), depth)

    def _open(self, op: int, length: int, depth: int) -> None:
        if depth > MAX_TREE_DEPTH:
            raise _Unstorable("nested too deep", f"more than {MAX_TREE_DEPTH} levels")
        self._ops.append(op)
        self._ints.append(length)

    def _dict(self, items: dict[Any, Any], depth: int) -> None:
        metadata = vars(items).get("_metadata") if type(items) is OrderedDict else None
        op = _DICT if type(items) is dict else _ODICT if metadata is None else _ODICT_META
        self._open(op, len(items), depth)
        if op == _ODICT_META:
            self._value(metadata, depth)
        key: Any = None
        try:
            for key, value in items.items():
                if type(key) is not str and not keypath.is_key(key):
                    raise _Unstorable(
                        "this type can't be a key", f"{type(key).__module__}.{type(key).__qualname__}"
                    )
                self._value(key, depth)
                self._value(value, depth)
        except _Unstorable as error:
            error.keys.append(key)
            raise


class TreeReader:
    """Gives back the trees a TreeWriter took, in the same order.

    Raises:
        ProtocolError: From every method, for columns no TreeWriter makes. It may also let StopIteration,
            IndexError or TypeError escape; `ckptd.descriptor_codec` turns all of them into ProtocolError.
    """

    def __init__(self, columns: Columns) -> None:
        if len(columns.ops) > MAX_TREE_NODES:
            raise ProtocolError(
                "too many values", seen=str(len(columns.ops)), wanted=f"at most {MAX_TREE_NODES}"
            )
        self._op = iter(columns.ops)
        self._int = iter(numbers(columns.ints, "q"))
        self._float = iter(numbers(columns.floats, "d"))
        text = columns.text.decode()
        self.strings: list[str] = [text[a:b] for a, b in _spans(columns.string_lengths, len(text))]
        self._blobs = columns.blobs
        self._blob_span = _spans(columns.blob_lengths, len(columns.blobs))

    def read(self) -> Any:
        return self._value(0)

    def finish(self) -> None:
        """Refuse what is left over in any column."""
        for column in (self._op, self._int, self._float, self._blob_span):
            if next(column, None) is not None:
                raise ProtocolError("not a descriptor", seen="values left over")

    def string(self, number: int) -> str:
        if number < 0:
            raise ProtocolError("not a descriptor", seen=f"string {number}")
        return self.strings[number]

    def _value(self, depth: int) -> Any:
        op = next(self._op)
        if op == _STR:
            return self.string(next(self._int))
        if op == _REF:
            return TensorRef(self._number())
        if op == _INT:
            return next(self._int)
        if op == _FLOAT:
            return next(self._float)
        if op >= _LIST:
            return self._container(op, depth + 1)
        if op <= _FALSE:
            return None if op == _NONE else op == _TRUE
        return self._rare(op)

    def _rare(self, op: int) -> Any:
        if op == _COMPLEX:
            real = next(self._float)
            return complex(real, next(self._float))
        if op == _SIZE:
            return SizeValue(tuple([self._number() for _ in range(self._number())]))
        if op == _DTYPE:
            return DtypeValue(self.string(next(self._int)))
        if op == _DEVICE:
            return DeviceValue(self.string(next(self._int)))
        start, stop = next(self._blob_span)
        data = self._blobs[start:stop]
        if op == _BYTES:
            return data
        if op == _BIG:
            return _big(data)
        if op in (_DOUBLES, _INTS) and len(data) % 8 == 0:
            return PackedNumbers("d" if op == _DOUBLES else "q", data)
        raise ProtocolError("not a descriptor", seen=f"opcode {op}")

    def _number(self) -> int:
        number: int = next(self._int)
        if number < 0:
            raise ProtocolError("not a descriptor", seen=f"length or row {number}")
        return number

    def _container(self, op: int, depth: int) -> Any:
        if depth > MAX_TREE_DEPTH:
            raise ProtocolError("nested too deep", wanted=f"at most {MAX_TREE_DEPTH} levels")
        length = self._number()
        if op in (_DICT, _ODICT, _ODICT_META):
            return self._dict(op, length, depth)
        value = self._value
        items = [value(depth) for _ in range(length)]
        if op == _LIST:
            return items
        if op == _TUPLE:
            return tuple(items)
        if op != _SET or not all(map(is_element, items)) or len(distinct := set(items)) != length:
            raise ProtocolError("not a descriptor", seen=f"opcode {op}")
        return distinct

    def _dict(self, op: int, length: int, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {} if op == _DICT else OrderedDict()
        if op == _ODICT_META:
            result._metadata = self._value(depth)  # type: ignore[attr-defined]
        value = self._value
        for _ in range(length):
            key = value(depth)
            if type(key) is not str and not keypath.is_key(key):
                raise ProtocolError("not a descriptor", seen=f"a key of type {type(key).__name__}")
            result[key] = value(depth)
        if len(result) != length:
            raise ProtocolError("not a descriptor", seen="a key twice")
        return result


def numbers(data: bytes, typecode: str) -> array[Any]:
    """The column of 8-byte numbers in data.

    Raises:
        ProtocolError: data isn't a whole number of them.
    """
    if len(data) % 8:
        raise ProtocolError(
            "not a descriptor", seen=f"a column of {len(data)} bytes", wanted="a multiple of 8"
        )
    return little_endian(array(typecode, data))


def _spans(lengths: bytes, total: int) -> Iterator[tuple[int, int]]:
    column = numbers(lengths, "q")
    if sum(column) != total or any(length < 0 for length in column):
        raise ProtocolError("not a descriptor", seen="lengths that don't add up")
    return pairwise(accumulate(column, initial=0))


def _big(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    if len(data) > MAX_INT_BYTES or -(2**63) <= value < 2**63:
        raise ProtocolError("not a descriptor", seen=f"an integer of {len(data)} bytes")
    return value
