# ruff: noqa: TID253
"""Restoring NumPy arrays and bytearrays in place."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from ckptd.snapshot.keypath import Path
from ckptd.tensors.restore_findings import Findings, Target, Write
from ckptd.tensors.restore_kinds import is_number
from ckptd.tensors.restore_number import as_shaped


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
        return found.wrong_kind(live, stored, path) if found.strict else lambda: stored
    if found.follows and (stored.shape, stored.dtype) != (live.shape, live.dtype):
        return lambda: stored
    if stored.shape != live.shape:
        found.reshaped_at(path, live, stored)
        return lambda: live
    if stored.dtype != live.dtype:
        if found.strict:
            found.problem(path, f"is {stored.dtype}, live {live.dtype}")
        return lambda: stored
    if not live.flags.writeable:
        return lambda: stored
    if live.nbytes:  # it may share its memory with others of the state
        found.targets.append(Target(path, *_bytes_of(live, stored)))

    def write() -> Any:
        live[...] = stored
        return live

    return write


def plan_bytes(found: Findings, live: bytearray, stored: Any, path: Path) -> Write:
    """The write of a bytearray; one of another length that something views can't be resized, and is replaced."""
    if type(stored) is not bytearray:
        return found.wrong_kind(live, stored, path)
    if stored and len(stored) == len(live):  # it may share its memory with an array of the state
        as_arrays = (numpy.frombuffer(each, numpy.uint8) for each in (live, stored))
        found.targets.append(Target(path, *_bytes_of(*as_arrays)))

    def write() -> Any:
        try:
            live[:] = stored
        except BufferError:
            return stored
        return live

    return write


def _bytes_of(live: numpy.ndarray, stored: numpy.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as bytes, one dimension more; torch knows neither all of NumPy's dtypes nor negative strides."""
    ahead: Any = (*(slice(None, None, -1 if stride < 0 else 1) for stride in live.strides), ...)
    plain = numpy.asarray(stored[ahead], order="C")
    return _as_bytes(live[ahead]), _as_bytes(plain)


def _as_bytes(array: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(numpy.asarray(_Bytes(array)))


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
