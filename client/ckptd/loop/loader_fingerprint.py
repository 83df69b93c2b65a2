# ruff: noqa: TID253
"""A check number over a sample of a batch's bytes: whether two batches are (most likely) the same.

The walk is bounded in what it reads, whatever the batch holds, and calls nothing of the user's: an object counts by
its attributes. What has no order (a set) or can't be read here (a tensor of a device, a handle) counts by its type.
"""

from __future__ import annotations

import collections
import contextlib
import types
import zlib
from typing import Any, Final

import numpy as np
import torch

ROOM: Final = 32 << 10  # bytes read of a batch
_LEAST: Final = 512  # bytes that one item of a container gets; so of a long container only some are read
_BLOCK: Final = 64  # bytes read in one place of a large array
_DEPTH: Final = 8
_NUMBERS: Final = frozenset({bool, int, float, complex, type(None)})
_MANY_NUMBERS: Final = 512
_BIG_INT: Final = 1 << 256
#: Kinds of dtype whose bytes are all content: no padding, no references.
_KINDS: Final = frozenset("biufcmMSU")
_AS_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPYS: Final = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}) | {
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def fingerprint(batch: Any) -> int | None:
    """The check number; None if nothing of the batch's content can be read."""
    reading = _Reading()
    reading.take(batch, ROOM, 0)
    return reading.check if reading.content else None


class _Reading:
    def __init__(self) -> None:
        self.check, self.content = 0, False

    def take(self, value: Any, room: int, depth: int) -> None:
        kind = type(value)
        if kind in _NUMBERS:
            self._add(_text(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value, room)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(np.asarray(value), room, depth)
        elif isinstance(value, str):
            self._name(str(len(value)))
            self._bytes(str.encode(value[:room], "utf-8", "surrogatepass"), room)
        elif isinstance(value, (bytes, bytearray)):
            self._bytes(value, room)
        else:
            self._name(kind.__qualname__)
            if depth < _DEPTH:
                self._inside(value, room, depth + 1)

    def _inside(self, value: Any, room: int, depth: int) -> None:
        if isinstance(value, dict):
            items = list(dict.items(value))
            if all(type(key) is str for key, _ in items):
                items.sort(key=lambda item: item[0])  # one made from a set has another order in each process
            self._items([part for item in items for part in item], room, depth)
        elif isinstance(value, (list, tuple)):
            self._items(value, room, depth)
        elif isinstance(value, collections.deque):
            self._items(list(value), room, depth)
        elif not isinstance(
            value, (type, types.ModuleType, types.FunctionType, torch.nn.Module, set, frozenset)
        ):
            self._items([part for item in _attributes(value) for part in item], room, depth)

    def _items(self, items: list[Any] | tuple[Any, ...], room: int, depth: int) -> None:
        size = len(items)
        self._name(str(size))
        some = items[:: -(-size // _MANY_NUMBERS) or 1]
        if size > 8 and set(map(type, some)) <= _NUMBERS:
            return self._add(" ".join(map(_text, some)))
        if size:
            step = -(-size * _LEAST // max(room, _LEAST))
            share = room * step // size
            for item in items[::step]:
                self.take(item, share, depth)
        return None

    def _tensor(self, tensor: torch.Tensor, room: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if not _is_readable(tensor):
                return
            values = tensor.detach()
            if values.is_conj() or values.is_neg():
                values = values.resolve_conj().resolve_neg()
            if values.dtype not in _NUMPYS:
                self._name(str(values.dtype))
                if values.element_size() not in _AS_INTEGERS:
                    return
                values = values.view(_AS_INTEGERS[values.element_size()])
            self._array(values.numpy(), room, 0)

    def _array(self, array: np.ndarray[Any, Any], room: int, depth: int) -> None:
        self._name(f"{array.dtype.str}{array.shape}")
        if array.dtype == object and depth < _DEPTH:
            return self._items(array.ravel().tolist(), room, depth + 1)
        if array.dtype.kind not in _KINDS or array.dtype.char in "gG" or not array.size:
            return None
        if not array.flags.c_contiguous:
            array = _packed(array, room)
        return self._bytes(array.reshape(-1).view(np.uint8), room)

    def _bytes(self, data: Any, room: int) -> None:
        size, count = len(data), max(room // _BLOCK, 1)
        if size > count * _BLOCK:
            step = size // count
            data = np.asarray(memoryview(data))[: step * count].reshape(count, step)[:, :_BLOCK].tobytes()
        self.check, self.content = zlib.crc32(data, self.check + size & 0xFFFFFFFF), True

    def _add(self, text: str) -> None:
        self.check, self.content = zlib.crc32(text.encode(), self.check), True

    def _name(self, text: str) -> None:
        self.check = zlib.crc32(text.encode("utf-8", "backslashreplace"), self.check)


def _packed(array: np.ndarray[Any, Any], room: int) -> np.ndarray[Any, Any]:
    """As it lies in memory, if that has no gaps; else a part of it, of every sample."""
    dense = array.transpose(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))
    if dense.flags.c_contiguous:
        return dense
    while array.nbytes > room:
        inner = max(
            range(array.ndim), key=lambda axis: (axis > 0 and array.shape[axis] > 1, array.shape[axis])
        )
        array = array[(slice(None),) * inner + (slice(None, None, 2),)]
    return np.ascontiguousarray(array)


def _text(number: Any) -> str:
    if type(number) is int and abs(number) >= _BIG_INT:
        return str(hash(number))
    return repr(number)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether its values lie in this process's memory as one array."""
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Those of an object, by name; no private number, which may be an address or a hash."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            slot = cls.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[name] = slot.__get__(value)
                except AttributeError:  # not set
                    continue
    with contextlib.suppress(AttributeError):  # it has slots only, or nothing to be seen
        found.update(object.__getattribute__(value, "__dict__"))
    names = sorted(name for name in found if name[:1] != "_" or type(found[name]) not in _NUMBERS)
    return [(name, found[name]) for name in names]
