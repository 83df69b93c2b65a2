"""From a plain tree (ckptd.snapshot.values) to columns (ckptd.snapshot.tree_columns), exact in value and type."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ckptd.errors import UnstorableState
from ckptd.limits import MAX_TREE_DEPTH, MAX_TREE_NODES
from ckptd.snapshot import keypath
from ckptd.snapshot.tree_columns import MAX_INT_BYTES, Columns, Op, is_element, little_endian, signed_bytes
from ckptd.snapshot.values import DeviceValue, DtypeValue, PackedNumbers, SizeValue, TensorRef

_STRINGS = frozenset({str})

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


class _Unstorable(Exception):
    """Carries the reason up the walk, which adds the keys it passes, innermost first."""

    def __init__(self, what: str, seen: str, todo: str = "") -> None:
        super().__init__(what)
        self.what, self.seen, self.todo = what, seen, todo
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
            UnstorableState: A leaf has no exact form; the error names its key path, from `where` on.
        """
        try:
            self._value(value, 0)
        except _Unstorable as error:
            path = (*where, *reversed(error.keys))
            raise UnstorableState(
                error.what, where=keypath.show(path), seen=error.seen, todo=error.todo
            ) from None
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
            self._tuple(value, depth + 1)
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
        size = signed_bytes(value)
        if size > MAX_INT_BYTES:
            raise _Unstorable(
                "integer too long",
                f"{size} bytes, at most {MAX_INT_BYTES} can be read back",
                "store hex(value)",
            )
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
                    todo = "store value.encode('utf-8', 'surrogatepass')"
                    raise _Unstorable("string isn't valid Unicode text", ascii(value)[:200], todo) from None
            number = self._strings[value] = len(self._strings)
        return number

    def _blob(self, op: int, data: bytes) -> None:
        self._ops.append(op)
        self._blobs.append(data)

    def _sequence(self, op: int, items: Sequence[Any], depth: int) -> None:
        self._open(op, depth)
        self._ints.append(len(items))
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

    def _tuple(self, items: tuple[Any, ...], depth: int) -> None:
        if items and _STRINGS.issuperset(map(type, items)):
            self._open(_NAMES, depth)
            self._ints.append(len(items))
            self._ints.extend(map(self._string, items))
        else:
            self._sequence(_TUPLE, items, depth)

    def _open(self, op: int, depth: int) -> None:
        if depth > MAX_TREE_DEPTH:
            raise _Unstorable("nested too deep", f"more than {MAX_TREE_DEPTH} levels")
        self._ops.append(op)

    def _dict(self, items: dict[Any, Any], depth: int) -> None:
        metadata = vars(items).get("_metadata") if type(items) is OrderedDict else None
        op = _DICT if type(items) is dict else _ODICT if metadata is None else _ODICT_META
        self._open(op, depth)
        if op == _ODICT_META:
            self._value(metadata, depth)
        self._keys(tuple(items), depth)
        key: Any = None
        try:
            for key in items:
                self._value(items[key], depth)
        except _Unstorable as error:
            error.keys.append(key)
            raise

    def _keys(self, keys: tuple[Any, ...], depth: int) -> None:
        for key in keys:
            if type(key) is not str and not keypath.is_key(key):
                raise _Unstorable(
                    "this type can't be a key", f"{type(key).__module__}.{type(key).__qualname__}"
                )
        try:
            self._tuple(keys, depth)
        except _Unstorable as error:
            error.keys.clear()  # it is the dict that holds the bad key
            raise
