# ruff: noqa: TID253
"""A stored number for a live tensor or array of one element: `best = torch.tensor(inf)`, later `best = loss.item()`."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy
import torch

from ckptd.snapshot.keypath import Path
from ckptd.tensors.generator_state import kind_of
from ckptd.tensors.restore_findings import Findings

_Live = TypeVar("_Live", torch.Tensor, numpy.ndarray)


def as_shaped(found: Findings, live: _Live, stored: Any, path: Path) -> _Live | None:
    """A tensor or array of live's shape and dtype that holds the number stored.

    Returns:
        It; None, noted as a problem, where the dtype can't hold the number exactly. With strict=False it is
        converted if that is possible at all.
    """
    number = stored.item() if isinstance(stored, numpy.generic) else stored
    made = _filled(live, number)
    if made is not None and _equal(made.item(), number):
        return made
    fault = f"is {kind_of(stored)} {number!r} in the checkpoint, which {live.dtype} in the live state can't hold exactly"
    if made is None:
        found.problem(path, fault)
        return None
    found.differs(path, fault)
    return None if found.strict else made


def _filled(live: _Live, number: Any) -> _Live | None:
    try:
        if isinstance(live, torch.Tensor):
            return torch.full(live.shape, number, dtype=live.dtype, device="cpu")
        if isinstance(number, complex) and live.dtype.kind != "c":
            return None
        with numpy.errstate(all="ignore"):
            return numpy.full(live.shape, number, live.dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # it has no place in this dtype at all
        return None


def _equal(held: Any, number: Any) -> bool:
    """Whether both are one value; NaN is itself, and 0.0 isn't -0.0."""
    if isinstance(held, complex) or isinstance(number, complex):
        held, number = complex(held), complex(number)
        return _equal(held.real, number.real) and _equal(held.imag, number.imag)
    if held != number:
        return bool(held != held and number != number)
    return bool(held or math.copysign(1, held) == math.copysign(1, number))
