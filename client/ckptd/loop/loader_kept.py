# ruff: noqa: TID253
"""One attribute of a sampler: what it held at first, and what it held when it was read last, so that it is packed once."""

from __future__ import annotations

import collections
import marshal
import operator
import zlib
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptd.loop.loader_attributes import Holder
from ckptd.loop.loader_packing import Packed, Packing, Unpackable, bytes_of, is_readable
from ckptd.loop.loader_torchs import TORCHS_SAMPLERS
from ckptd.snapshot.values import SCALARS

MISSING: Final = object()  #: no such attribute
Check: TypeAlias = tuple[int, int]

_SMALL: Final = 1 << 20  # bytes; beyond it a sample is looked at
_SAMPLE: Final = 512
_LONG: Final = 4096
_FLAT: Final = frozenset({"int", "float", "bool", "text"})


class Kept:
    """An attribute.

    Attributes:
        first: What it held at first.
        packed: What it held when it was read last.
    """

    def __init__(self, holder: Holder, first: Any) -> None:
        self.first = first
        self.packed: Packed = None
        self._at_first: Check | None = None  # None: it can't be packed, or wasn't yet
        self._packed_first: list[Packed] = []  # empty: it isn't kept
        sampled = type(holder.of) in TORCHS_SAMPLERS and type(first) in (list, np.ndarray, torch.Tensor)
        self._sampled: Any = _sample(first) if sampled else None
        self._of: Any = MISSING
        self._seen: Any = None
        self._check: Check = (0, 0)
        self._cost = (0, 0)

    def begin(self, packing: Packing, most: int) -> int:
        """Note what it is like at first.

        Args:
            packing: Of the whole.
            most: The bytes that may be kept.

        Returns:
            How many bytes are kept of it.
        """
        if self._sampled is not None and _size(self.first) > _SMALL:
            return 0
        try:
            self._take(self.first, packing)
        except Unpackable:
            return 0
        self._at_first = self._check
        if self._cost[1] > most:
            return 0
        self._packed_first = [self.packed]
        return self._cost[1]

    def is_as_at_first(self, value: Any, packing: Packing) -> bool:
        """Whether it holds what it held at first; else packed is what it holds.

        Raises:
            Unpackable: It can't be packed.
        """
        if (
            value is self.first
            and self._at_first is None
            and self._sampled is not None
            and self._is_untouched()
        ):
            return True
        self._take(value, packing)
        return (value is self.first or type(value) in SCALARS) and self._check == self._at_first

    def _is_untouched(self) -> bool:
        """Whether what it held at first is as it was then."""
        if self._at_first is None and self._sampled is not None:
            return bool(self._sampled == _sample(self.first))
        return self._at_first is None or self.check(self.first) == self._at_first

    def keep(self) -> None:
        """Keep what it was like at first, if it is still so: it is about to be changed."""
        if not self._packed_first and self.first is not MISSING and self._is_untouched():
            self._at_first = self.check(self.first)
            if self._at_first is not None:
                self._packed_first = [self.packed]

    def before(self) -> list[Packed] | None:
        """What has to be put back into what it held at first: nothing, or one thing; None where that isn't known."""
        if self._is_untouched():
            return []
        return self._packed_first or None

    def check(self, value: Any) -> Check | None:
        """A check number over the value; None if it can't be packed."""
        try:
            self._take(value, Packing())
        except Unpackable:
            return None
        return self._check

    def _take(self, value: Any, packing: Packing) -> None:
        if value is self._of and self._is_as_seen(value):
            packing.take(*self._cost)
            return
        values, size = packing.values, packing.bytes
        self._of = MISSING
        try:
            self.packed = packing.pack(value)
        except Unpackable:
            packing.values, packing.bytes = values, size  # for others
            raise
        self._cost = values - packing.values, size - packing.bytes
        self._check, self._seen, self._of = check_of(self.packed), _seen(value, self.packed), value

    def _is_as_seen(self, value: Any) -> bool:
        if isinstance(self._seen, _Copy):
            return self._seen.is_of(value)
        return self._seen is not None and bool(self._seen == _digest(value))


class _Copy:
    """A copy of a long container of numbers or text.

    That its numbers and texts are still the same objects is found out in a fraction of a digest's time; equal ones may
    be of another kind (1 and True, 0.0 and -0.0).
    """

    def __init__(self, of: Any, *, nested: bool = False) -> None:
        self._of, self._nested = of, nested

    def is_of(self, value: Any) -> bool:
        """Whether the container holds what was copied."""
        if self._nested:
            lists = len(value) == len(self._of) and all(type(one) is list for one in value)
            return lists and all(map(_holds_same, value, self._of))
        return _holds_same(value, self._of)


def _holds_same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def check_of(packed: Packed) -> Check:
    data = marshal.dumps(packed, 2)
    return len(data), zlib.crc32(data)


def _seen(value: Any, packed: Packed) -> Any:
    """What tells later whether the value is as it was; None if nothing can."""
    kind = type(value)
    if kind in (list, tuple, collections.deque) and len(value) > _LONG:
        items = packed[2:] if kind is collections.deque else packed[1:]
        if items[0] in _FLAT:
            return _Copy(kind(value) if kind is not collections.deque else value.copy())
        if kind is list and items[0] == "nested" and items[1] == "list" and items[3][0] in _FLAT:
            return _Copy(list(map(list, value)), nested=True)
    return _digest(value)


def _digest(value: Any) -> Any:
    if type(value) is np.ndarray:
        return (
            value.dtype.str,
            value.shape,
            zlib.crc32(value.tobytes()),
        )
    if type(value) is torch.Tensor:
        return (
            (value.dtype, value.shape, zlib.crc32(bytes_of(value).tobytes())) if is_readable(value) else None
        )
    try:
        data = marshal.dumps(value, 2)
    except ValueError:
        return None
    return len(data), zlib.crc32(data)


def _size(value: Any) -> int:
    return len(value) * 8 if isinstance(value, list) else int(value.nbytes)


def _sample(value: Any) -> Any:
    if type(value) is list:
        return len(value), value[:: len(value) // _SAMPLE + 1]
    if type(value) is np.ndarray:
        return value.shape, value.flat[:: value.size // _SAMPLE + 1].tolist()
    flat = value.detach().reshape(-1)
    version = 0 if value.is_inference() else value._version
    return value.shape, version, flat[:: flat.numel() // _SAMPLE + 1].tolist()
