# ruff: noqa: TID253
"""What tells whether an attribute is still what it was, at little cost: by value if small, else by identity and size."""

from __future__ import annotations

import weakref
from typing import Any, Final

import numpy as np
import torch

from ckptd.loop.loader_attributes import SIZED
from ckptd.loop.loader_rng import is_generator
from ckptd.snapshot.values import SCALARS

Mark = Any  #: comparable within one process only

_MAX_LOOKED_AT: Final = 1024  # items of containers, in one look
_MAX_OF_ONE: Final = 256
_MAX_DEPTH: Final = 8
_SMALL_BYTES: Final = 1024


class _TooLarge(Exception):
    pass


class Marker:
    """Marks attributes, of which it looks into containers up to a size; and always as far as the first time."""

    def __init__(self) -> None:
        self._left = _MAX_LOOKED_AT
        self._room: dict[Any, int] = {}

    def mark(self, spot: Any, value: Any) -> Mark:
        """Compared later, it tells whether the attribute changed: by value if small, else by identity and size.

        Args:
            spot: Which attribute.
            value: What it holds.
        """
        room = self._room.get(spot)
        left = [min(self._left, _MAX_OF_ONE) if room is None else room]
        before = left[0]
        try:
            found = _mark(value, left, 0)
            fits = True
        except _TooLarge:
            found, fits = ("data", Same(value), len(value)), False
        if room is None:
            self._room[spot] = _MAX_OF_ONE * fits
            self._left -= (before - left[0]) * fits
        return found


def _mark(value: Any, left: list[int], depth: int) -> Mark:
    kind = type(value)
    if value is None:
        return None
    if kind in SCALARS:
        return ("data", kind, value)
    if isinstance(value, SIZED):
        return _mark_container(value, left, depth)
    if isinstance(value, np.ndarray):
        return ("data", Same(value), value.tobytes() if value.nbytes <= _SMALL_BYTES else None)
    if isinstance(value, torch.Tensor):
        return ("data", Same(value), 0 if value.is_inference() else value._version)
    if isinstance(value, np.generic):
        return ("data", kind, value.tobytes())
    return ("data" if is_generator(value) else "object", Same(value))


def _mark_container(value: Any, left: list[int], depth: int) -> Mark:
    left[0] -= len(value) + 1
    if left[0] < 0 or depth == _MAX_DEPTH:
        raise _TooLarge
    if isinstance(value, (set, frozenset)):
        return ("data", frozenset(item if type(item) in SCALARS else Same(item) for item in value))
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    return ("data", tuple([_mark(item, left, depth + 1) for item in value]))


class Same:
    """Equal to one of the same object, as long as that lives: an address may be another object's later."""

    __slots__ = ("_id", "_of")

    def __init__(self, of: Any) -> None:
        self._id = id(of)
        try:
            self._of: Any = weakref.ref(of)
        except TypeError:  # not a list or dict, which is kept alive
            self._of = lambda: of

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._id != other._id:
            return False
        of = self._of()
        return of is not None and of is other._of()


def is_opened(before: Mark, now: Mark) -> bool:
    """Whether an attribute that was None or missing became an object: most likely a file opened at first use."""
    return before is None and now is not None and now[0] == "object"
