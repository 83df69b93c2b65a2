# ruff: noqa: TID253
"""Containers of plain values as numbers and bytes: what a sampler keeps, small enough to be part of a position.

A plain value stands for itself. Anything else is a list that begins with its kind: a long list of numbers is bytes with the
name of their dtype, so that a position holds no tensor, and a million indices are four megabytes.
"""

from __future__ import annotations

import collections
import marshal
import re
from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptd.snapshot.values import SCALARS

Packed: TypeAlias = Any

MAX_BYTES: Final = 64 << 20  # of all that one loader's samplers keep, packed, and
MAX_VALUES: Final = 4 << 20  # how many values those are
MAX_DEPTH: Final = 8
_A_NODE: Final = 16  # values that a container counts as
_FEW: Final = 8
_MAX_BITS: Final = 1024  # of an integer
_CODES: Final = {int: (ord("i"), "<i4"), float: (ord("g"), "<f8")}  # as marshal writes them
DTYPE: Final = re.compile(r"[<>|][biufcSU][1-9]\d{0,3}|[<>][mM]8\[\w{1,4}\]")
TYPECODES: Final = frozenset("bBhHiIlLqQfd")
SEQUENCES: Final[dict[str, type]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_NAMES: Final = {kind: name for name, kind in SEQUENCES.items()}
DICTS: Final[dict[str, type]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
}  # fmt: skip
FACTORIES: Final[dict[str | None, Any]] = {
    None: None, "list": list, "dict": dict, "set": set, "int": int, "float": float, "bool": bool, "str": str,
    "tuple": tuple, "deque": collections.deque,
}  # fmt: skip
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip


class Unpackable(Exception):
    """It isn't made of plain values, or there is too much of it."""


class Packing:
    """Packs values into the room that is left.

    Attributes:
        bytes: Those left, and
        values: how many values may still come.
    """

    def __init__(self) -> None:
        self.bytes, self.values = MAX_BYTES, MAX_VALUES

    def pack(self, value: Any, depth: int = 0) -> Packed:
        """Plain values, which don't change when value does.

        Raises:
            Unpackable: value holds something else, or there is no room.
        """
        kind = type(value)
        if kind in SCALARS:
            self.take(1, len(value) if kind in (str, bytes) else 8)
            if kind is int and value.bit_length() > _MAX_BITS:
                raise Unpackable
            return value
        if depth == MAX_DEPTH:
            raise Unpackable
        self.take(_A_NODE, 0)
        if kind in _NAMES:
            return [_NAMES[kind], *self._items(value if kind is list else list(value), depth)]
        if kind is collections.deque:
            return ["deque", value.maxlen, *self._items(list(value), depth)]
        if kind in DICTS.values():
            return self._dict(value, depth)
        return self._memory(value)

    def _dict(self, value: Any, depth: int) -> Packed:
        factory = getattr(value, "default_factory", None)
        names = [name for name, known in FACTORIES.items() if known is factory]
        if not names:
            raise Unpackable
        keys, values = self._items(list(value), depth), self._items(list(value.values()), depth)
        return ["mapping", type(value).__name__, names[0], keys, values]

    def _memory(self, value: Any) -> Packed:
        """What is an array of bytes already."""
        kind = type(value)
        if kind is bytearray:
            return ["bytearray", self._bytes(bytes(value))]
        if kind is array and value.typecode in TYPECODES:
            return ["array", value.typecode, self._bytes(value.tobytes())]
        if kind is np.ndarray and DTYPE.fullmatch(value.dtype.str):
            self._room_for(value.nbytes)
            return ["ndarray", value.dtype.str, list(value.shape), self._bytes(value.tobytes())]
        if isinstance(value, np.generic) and DTYPE.fullmatch(value.dtype.str) and kind is value.dtype.type:
            return ["scalar", value.dtype.str, self._bytes(value.tobytes())]
        if kind is torch.Tensor and is_readable(value):
            self._room_for(value.numel() * value.element_size())
            return [
                "tensor",
                str(value.dtype)[6:],
                list(value.shape),
                self._bytes(bytes_of(value).tobytes()),
            ]
        raise Unpackable

    def _items(self, items: list[Any], depth: int) -> list[Any]:
        self.take(len(items), 0)
        numbers = _numbers(items) if len(items) > _FEW else None
        if numbers is not None:
            return [*numbers[:2], self._bytes(numbers[2])]
        kinds = set(map(type, items))
        kind = kinds.pop() if len(kinds) == 1 else None
        if len(items) > _FEW and kind in _FLAT:
            packed = _FLAT[kind](items)
            if packed is not None:
                return [packed[0], *map(self._bytes, packed[1:])]
        if len(items) > _FEW and kind is not None and issubclass(kind, np.generic):
            dtype = items[0].dtype
            if DTYPE.fullmatch(dtype.str) and dtype.kind not in "SUmM":
                return ["scalars", dtype.str, self._bytes(np.array(items, dtype).tobytes())]
        if len(items) > _FEW and kind in (list, tuple) and depth + 1 < MAX_DEPTH:
            self._room_for(sum(map(len, items)))
            lengths = self._bytes(np.array(list(map(len, items)), "<u4").tobytes())
            inner = self._items(list(chain.from_iterable(items)), depth + 1)
            return ["nested", _NAMES[kind], lengths, inner]
        return ["each", [self.pack(item, depth + 1) for item in items]]

    def _bytes(self, data: Any) -> Any:
        if isinstance(data, bytes):
            self.take(0, len(data))
        return data

    def _room_for(self, size: int) -> None:
        if size > self.bytes:
            raise Unpackable

    def take(self, values: int, size: int) -> None:
        """Take room for values, and for size bytes.

        Raises:
            Unpackable: There isn't so much.
        """
        self.values -= values
        self.bytes -= size
        if self.values < 0 or self.bytes < 0:
            raise Unpackable


def _numbers(items: list[Any]) -> tuple[str, str, bytes] | None:
    """Integers of 32 bits or floats, nothing else among them; read in one go, types too.

    To look at a million numbers that lie shuffled in memory one after another takes a tenth of a second, each time.
    """
    code, name = _CODES.get(type(items[0]), (0, ""))
    if not code:
        return None
    try:
        written = marshal.dumps(items, 2)
    except ValueError:
        return None
    each = np.dtype([("code", "u1"), ("value", name)])
    if len(written) != 5 + each.itemsize * len(items):
        return None
    read = np.frombuffer(written, each, offset=5)
    if not (read["code"] == code).all():
        return None
    found = np.ascontiguousarray(read["value"])
    if name == "<f8":
        return "float", name, found.tobytes()
    return _integers(found)


def _integers(found: np.ndarray[Any, Any]) -> tuple[str, str, bytes]:
    small, large = int(found.min()), int(found.max())
    fitting = (
        name for name in ("|u1", "<u2", "<i4") if np.iinfo(name).min <= small and large <= np.iinfo(name).max
    )
    name = next(fitting, "<i8")
    return "int", name, found.astype(name).tobytes()


def _long_integers(items: list[int]) -> tuple[str, str, bytes] | None:
    try:
        return _integers(np.array(array("q", items)))
    except OverflowError:
        return None


def _texts(items: list[str]) -> tuple[Any, ...]:
    data = "".join(items).encode("utf-8", "surrogatepass")
    return "text", np.array(list(map(len, items)), "<u4").tobytes(), data


_FLAT: Final[dict[Any, Callable[[list[Any]], tuple[Any, ...] | None]]] = {
    int: _long_integers,
    bool: lambda items: ("bool", "|b1", np.array(items, "|b1").tobytes()),
    str: _texts,
}


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether it can be packed."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in DTYPES.values()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A readable tensor's, in order; its own memory where it is dense."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
