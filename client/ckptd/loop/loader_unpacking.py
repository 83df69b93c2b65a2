# ruff: noqa: TID253
"""What loader_packing packed, made anew.

It came from a disk: each length is compared with the bytes that are there, no dtype is taken that isn't one of plain
numbers or text, and nothing is called but the classes of containers that are listed.
"""

from __future__ import annotations

import collections
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from ckptd.loop.loader_packing import DICTS, DTYPE, DTYPES, FACTORIES, MAX_DEPTH, SEQUENCES, TYPECODES, Packed
from ckptd.snapshot.values import SCALARS

_MOST_OF_A_TABLE: Final = 64  # places for each member
_NESTED: Final = {"list": list, "tuple": tuple}


def unpack(packed: Packed) -> Any:
    """The value that was packed, made anew.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: It isn't what Packing gives.
    """
    return _unpack(packed, 0)


def _unpack(packed: Packed, depth: int) -> Any:
    if type(packed) in SCALARS:
        return packed
    if type(packed) is not list or not packed or depth > MAX_DEPTH:
        raise ValueError("no packed value")
    kind, *parts = packed
    if kind in SEQUENCES:
        return _of_its_size(SEQUENCES[kind], _items(parts, depth))
    if kind == "deque":
        return _deque(_number(parts.pop(0)), _items(parts, depth))
    if kind in _READERS:
        return _READERS[kind](*parts)
    if kind != "mapping":
        raise ValueError(f"a packed {kind!r}")
    name, factory, keys, values = parts
    made = collections.defaultdict(FACTORIES[factory]) if name == "defaultdict" else DICTS[name]()
    found, given = _items(keys, depth), _items(values, depth)
    for key, value in zip(found, given, strict=True):
        made[key] = value
    if len(made) != len(found) or (factory is not None and name != "defaultdict"):
        raise ValueError("keys that are equal, or a factory of none")
    return made


def _of_its_size(kind: type, items: list[Any]) -> Any:
    made: Any = items if kind is list else kind(items)
    if kind is set:
        arrange(made, items)
    elif kind is frozenset and list(made) != items:
        made = frozenset(set(items))
    if len(made) != len(items):
        raise ValueError("members that are equal")
    return made


def arrange(members: set[Any], order: list[Any]) -> None:
    """Fill a set so that it gives its members in that order, if that can be done.

    A set's order is that of its table, which doesn't shrink with it: so the table is enlarged by members that are removed
    again, to each size that it may have had.
    """
    size, most = 16, max(1024, _MOST_OF_A_TABLE * len(order))
    members.clear()
    members.update(order)
    while list(members) != order and size <= most:
        members.clear()
        members.update(order)
        new = (number for number in range(size) if number not in members)
        others = set(itertools.islice(new, max(size // 4 - len(order), 0)))
        members.update(others)
        members.difference_update(others)
        size *= 2


def _deque(maxlen: Any, items: list[Any]) -> Any:
    made: Any = collections.deque(items, maxlen)
    if len(made) != len(items):
        raise ValueError(f"{len(items)} values of at most {maxlen}")
    return made


def _number(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"a number that is {type(value).__name__}")
    return value


def _items(packed: Any, depth: int) -> list[Any]:
    if type(packed) is not list or not packed:
        raise ValueError("no packed values")
    kind, *parts = packed
    if kind == "each":
        (items,) = parts
        if type(items) is not list:
            raise TypeError("no list of values")
        return [_unpack(item, depth + 1) for item in items]
    if kind == "text":
        return list(_split(bytes(parts[1]).decode("utf-8", "surrogatepass"), parts[0]))
    if kind == "nested":
        name, lengths, inner = parts
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        return [_NESTED[name](items) for items in _split(_items(inner, depth + 1), lengths)]
    return _numbers(kind, *parts)


def _numbers(kind: str, name: Any, data: Any) -> list[Any]:
    found = _array(name, None, data)
    wanted = {"int": "iu", "float": "f", "bool": "b", "scalars": "biufc"}[kind]
    if found.dtype.kind not in wanted or (kind == "float" and name != "<f8"):
        raise ValueError(f"a list of {kind} in {name}")
    return list(found) if kind == "scalars" else found.tolist()


def _split(whole: Sequence[Any], lengths: Any) -> Iterable[Any]:
    ends = np.cumsum(_array("<u4", None, lengths), dtype="<i8").tolist()
    if (ends[-1] if ends else 0) != len(whole):
        raise ValueError(f"{len(whole)} values for {ends[-1:]}")
    return [whole[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _array(name: Any, shape: Any, data: Any) -> np.ndarray[Any, Any]:
    if type(name) is not str or not DTYPE.fullmatch(name) or type(data) is not bytes:
        raise ValueError(f"an array of {name!r}")
    found = np.frombuffer(bytearray(data), np.dtype(name))
    return found if shape is None else found.reshape(_shape(shape, found.size))


def _shape(shape: Any, size: int) -> list[int]:
    if type(shape) is not list or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"a shape that is {shape!r}")
    if math.prod(shape) != size:
        raise ValueError(f"{size} values in the shape {shape}")
    return shape


def _scalar(name: Any, data: Any) -> Any:
    return _array(name, [], data)[()]


def _tensor(name: Any, shape: Any, data: Any) -> torch.Tensor:
    if type(data) is not bytes:
        raise TypeError("a tensor without bytes")
    dtype = DTYPES[name]
    count, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise ValueError(f"{len(data)} bytes of {name}")
    shape = _shape(shape, count)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _typed(typecode: Any, data: Any) -> array[Any]:
    if type(typecode) is not str or typecode not in TYPECODES or type(data) is not bytes:
        raise ValueError(f"an array of {typecode!r}")
    made = array(typecode)
    made.frombytes(data)
    return made


def _bytearray(data: Any) -> bytearray:
    if type(data) is not bytes:
        raise TypeError("no bytes")
    return bytearray(data)


_READERS: Final[dict[str, Callable[..., Any]]] = {
    "bytearray": _bytearray, "array": _typed, "ndarray": _array, "scalar": _scalar, "tensor": _tensor,
}  # fmt: skip
