# ruff: noqa: TID253
"""Restoring NumPy arrays and bytearrays in place."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from ckptd.snapshot.keypath import Path
from ckptd.tensors.restore_findings import Findings, Held, Write
from ckptd.tensors.restore_kinds import is_number
from ckptd.tensors.restore_number import as_shaped
from ckptd.tensors.tied_values import Target


def plan_array(found: Findings, live: numpy.ndarray, stored: Any, path: Path) -> Write:
    """The write of an array: in place where shape and dtype agree, whatever its layout.

    One that is read-only is replaced; so is, with strict=False, one that was another dtype or no array. One of one
    element takes a number that its dtype holds.
    """
    if is_number(stored) and live.size == 1:
        stored = as_shaped(found, live, stored, path)
        if stored is None:
            return lambda: live
    if not isinstance(stored, numpy.ndarray):
        return found.other_kind(live, stored, path)
    if found.follows and (stored.shape, stored.dtype) != (live.shape, live.dtype):
        return lambda: stored
    if stored.shape != live.shape:
        found.reshaped_at(path, live, stored)
        found.held.append(Held(path, live))
        return lambda: live
    if stored.dtype != live.dtype:
        found.differs(path, f"is {stored.dtype}, live {live.dtype}")
        return lambda: stored
    if not live.flags.writeable:
        return lambda: stored
    write = _InPlace(live, stored, ...)
    if live.nbytes:  # it may share its memory with others of the state
        found.unread.need(stored)
        found.targets.append(Target(path, *_both_as_bytes(live, stored), write.set_apart, by_place=False))
    return write


class _InPlace:
    """Copies stored into live; where that can't be, or once it is set apart, it gives stored itself instead."""

    def __init__(self, live: Any, stored: Any, whole: Any) -> None:
        self._live, self._stored, self._whole, self._apart = live, stored, whole, False

    def set_apart(self) -> None:
        self._apart = True

    def __call__(self) -> Any:
        if self._apart:
            return self._stored
        try:
            self._live[self._whole] = self._stored
        except BufferError:  # a bytearray of another length that something views
            return self._stored
        return self._live


def plan_bytes(found: Findings, live: bytearray, stored: Any, path: Path) -> Write:
    """The write of a bytearray; one of another length that something views can't be resized, and is replaced."""
    if type(stored) is not bytearray:
        return found.wrong_kind(live, stored, path)
    write = _InPlace(live, stored, slice(None))
    if stored and len(stored) == len(live):  # it may share its memory with an array of the state
        as_arrays = (numpy.frombuffer(each, numpy.uint8) for each in (live, stored))
        found.targets.append(Target(path, *_both_as_bytes(*as_arrays), write.set_apart, by_place=False))
    return write


def _both_as_bytes(live: numpy.ndarray, stored: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    ahead = _ahead(live)
    return as_bytes(live), as_bytes(numpy.asarray(stored[ahead], order="C"))


def as_bytes(array: numpy.ndarray) -> torch.Tensor:
    """Its memory, one dimension more; torch knows neither all of NumPy's dtypes nor negative strides."""
    return torch.from_numpy(numpy.asarray(_Bytes(array[_ahead(array)])))


def _ahead(array: numpy.ndarray) -> Any:
    return (*(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides), ...)


class _Bytes:
    """The memory of an array as bytes, by NumPy's array interface."""

    def __init__(self, array: numpy.ndarray) -> None:
        self._array = array  # keeps the memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (*array.shape, array.itemsize),
            "strides": (*array.strides, 1),
            "data": (array.ctypes.data, False),  # never written to, but torch warns of what is read-only
        }
