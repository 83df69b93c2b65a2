"""From columns (ckptd.snapshot.tree_columns) back to a plain tree, safe on hostile bytes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate, islice, pairwise
from typing import Any

from ckptd.errors import ProtocolError
from ckptd.limits import MAX_TREE_DEPTH, MAX_TREE_NODES
from ckptd.snapshot import keypath
from ckptd.snapshot.tree_columns import MAX_INT_BYTES, Columns, Op, is_element, little_endian
from ckptd.snapshot.values import DeviceValue, DtypeValue, PackedNumbers, SizeValue, TensorRef

# Plain ints: looking a member up in the enum takes longer than all the rest of a node.
_NONE = int(Op.NONE)
_TRUE = int(Op.TRUE)
_FALSE = int(Op.FALSE)
_INT = int(Op.INT)
_BIG = int(Op.BIG)
_FLOAT = int(Op.FLOAT)
_COMPLEX = int(Op.COMPLEX)
_STR = int(Op.STR)
_BYTES = int(Op.BYTES)
_REF = int(Op.REF)
_SIZE = int(Op.SIZE)
_DTYPE = int(Op.DTYPE)
_DEVICE = int(Op.DEVICE)
_DOUBLES = int(Op.DOUBLES)
_INTS = int(Op.INTS)
_LIST = int(Op.LIST)
_TUPLE = int(Op.TUPLE)
_NAMES = int(Op.NAMES)
_SET = int(Op.SET)
_DICT = int(Op.DICT)
_ODICT = int(Op.ODICT)
_ODICT_META = int(Op.ODICT_META)


class TreeReader:
    """Gives back the trees a TreeWriter took, in the same order.

    Raises:
        ProtocolError: From every method, for columns no TreeWriter makes. It may also let StopIteration,
            IndexError or TypeError escape; `ckptd.snapshot.descriptor_codec` turns all of them into ProtocolError.
    """

    def __init__(self, columns: Columns) -> None:
        if len(columns.ops) > MAX_TREE_NODES:
            raise _bad(f"{len(columns.ops)} values", f"at most {MAX_TREE_NODES}")
        text = columns.text.decode()
        self._strings = [text[a:b] for a, b in _spans(columns.string_lengths, len(text))]
        self._blobs = columns.blobs
        self._ints = iter(numbers(columns.ints, "q"))
        self._columns: tuple[Iterator[Any], ...] = (
            iter(columns.ops),
            self._ints,
            iter(numbers(columns.floats, "d")),
            _spans(columns.blob_lengths, len(columns.blobs)),
        )
        nexts: list[Callable[[], Any]] = [column.__next__ for column in self._columns]
        self._op, self._int, self._float, self._span = nexts

    def read(self) -> Any:
        return self._value(0)

    def finish(self) -> None:
        """Refuse what is left over in any column."""
        if any(next(column, None) is not None for column in self._columns):
            raise _bad("values left over", "none")

    def _value(self, depth: int) -> Any:
        op = self._op()
        if op == _STR:
            return self._string()
        if op == _REF:
            return TensorRef(self._number())
        if op == _INT:
            return self._int()
        if op == _FLOAT:
            return self._float()
        if op >= _LIST:
            return self._container(op, depth + 1)
        if op <= _FALSE:
            return None if op == _NONE else op == _TRUE
        return self._rare(op)

    def _string(self) -> str:
        number = self._int()
        if number < 0:
            raise _bad(f"string {number}", "0 or more")
        text: str = self._strings[number]
        return text

    def _rare(self, op: int) -> Any:
        if op == _COMPLEX:
            real = self._float()
            return complex(real, self._float())
        if op == _SIZE:
            return SizeValue(tuple([self._number() for _ in range(self._number())]))
        if op == _DTYPE:
            return DtypeValue(self._string())
        if op == _DEVICE:
            return DeviceValue(self._string())
        start, stop = self._span()
        data = self._blobs[start:stop]
        if op == _BYTES:
            return data
        if op == _BIG:
            return _big(data)
        if op in (_DOUBLES, _INTS) and len(data) % 8 == 0:
            return PackedNumbers("d" if op == _DOUBLES else "q", data)
        raise _bad(f"opcode {op}", "another")

    def _number(self) -> int:
        number: int = self._int()
        if number < 0:
            raise _bad(f"length or row {number}", "0 or more")
        return number

    def _container(self, op: int, depth: int) -> Any:
        if depth > MAX_TREE_DEPTH:
            raise _bad("deeper nesting", f"at most {MAX_TREE_DEPTH} levels")
        if op >= _DICT:
            return self._dict(op, depth)
        length = self._number()
        if op == _NAMES:
            return self._names(length)
        value = self._value
        items = [value(depth) for _ in range(length)]
        if op == _LIST:
            return items
        if op == _TUPLE:
            return tuple(items)
        if op != _SET or not all(map(is_element, items)) or len(distinct := set(items)) != length:
            raise _bad(f"opcode {op}", "another")
        return distinct

    def _names(self, length: int) -> tuple[str, ...]:
        chosen = list(islice(self._ints, length))
        if len(chosen) != length or min(chosen, default=0) < 0:
            raise _bad("strings that aren't there", "all")
        strings = self._strings
        return tuple([strings[number] for number in chosen])

    def _dict(self, op: int, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {} if op == _DICT else OrderedDict()
        if op == _ODICT_META:
            result._metadata = self._value(depth)  # type: ignore[attr-defined]
        elif op > _ODICT_META:
            raise _bad(f"opcode {op}", "another")
        keys = self._value(depth - 1)
        if type(keys) is not tuple or not keypath.is_key(keys):
            raise _bad("keys that can't be", "a tuple of plain keys")
        value = self._value
        for key in keys:
            result[key] = value(depth)
        if len(result) != len(keys):
            raise _bad("a key twice", "each once")
        return result


def numbers(data: bytes, typecode: str) -> array[Any]:
    """The column of 8-byte numbers in data.

    Raises:
        ProtocolError: data isn't a whole number of them.
    """
    if len(data) % 8:
        raise _bad(f"a column of {len(data)} bytes", "a multiple of 8")
    return little_endian(array(typecode, data))


def _spans(lengths: bytes, total: int) -> Iterator[tuple[int, int]]:
    column = numbers(lengths, "q")
    if sum(column) != total or any(length < 0 for length in column):
        raise _bad("lengths that don't add up", f"{total} in all")
    return pairwise(accumulate(column, initial=0))


def _big(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    if len(data) > MAX_INT_BYTES or -(2**63) <= value < 2**63:
        raise _bad(f"a long integer of {len(data)} bytes", f"9 to {MAX_INT_BYTES}")
    return value


def _bad(seen: str, wanted: str) -> ProtocolError:
    return ProtocolError("not a descriptor", seen=seen, wanted=wanted)
