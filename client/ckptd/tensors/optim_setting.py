# ruff: noqa: TID253
"""A setting of an optimizer that is a number on one side and a tensor on the other: the live kind stays.

CUDA graphs and compiled steps read the live tensor: a number in its place would never reach them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from ckptd.snapshot.keypath import Path

_MOST: Final = 2**63 - 1  # that torch takes as one number


def number_in(value: Any) -> int | float | None:
    """The one number that value is or holds, exactly; None for anything else, and for a tensor that learns."""
    if isinstance(value, torch.Tensor):
        real = not (value.is_complex() or value.dtype is torch.bool or value.is_meta or value.requires_grad)
        return value.item() if real and value.layout is torch.strided and value.numel() == 1 else None
    return value if isinstance(value, (int, float)) else None


def is_number(value: Any) -> bool:
    """Whether a live setting is a plain number, that a stored tensor becomes too."""
    return type(value) in (int, float)


def filled(before: Any, value: Any) -> torch.Tensor | None:
    """A tensor like before with value in it, where before is a tensor of one element and value a number.

    None where before isn't one, where value fits it as it is, and where an integer tensor would cut 0.5 down to 0.
    """
    if not isinstance(before, torch.Tensor) or before.numel() != 1 or before.layout is not torch.strided:
        return None
    if (
        isinstance(value, torch.Tensor)
        and (value.dtype, value.shape) == (before.dtype, before.shape)
    ):  # fmt: skip
        return None
    number = number_in(value)
    if number is None or not _holds(before.dtype, number):
        return None
    result = torch.empty_like(before, requires_grad=False)
    wide = torch.float64 if before.is_floating_point() else torch.int64
    result.copy_(torch.tensor(number, dtype=wide, device="cpu"))
    return result.requires_grad_(before.requires_grad)


def _holds(dtype: torch.dtype, number: float) -> bool:
    if dtype.is_floating_point:
        return True
    if dtype.is_complex or dtype is torch.bool:
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= number <= min(limits.max, _MOST) and int(number) == number


def same_items(before: Any, value: Any) -> bool:
    """Whether both are lists or tuples of one length, as betas are: each item is a setting."""
    kinds = (list, tuple)
    return isinstance(before, kinds) and isinstance(value, kinds) and len(before) == len(value)


def roundings(before: Any, value: Any, path: Path) -> Iterator[tuple[Path, Any, float, torch.dtype]]:
    """Where a live tensor can't hold the stored number: key path, that number, what it will hold, its dtype."""
    if same_items(before, value):
        for index, (old, item) in enumerate(zip(before, value, strict=True)):
            yield from roundings(old, item, (*path, index))
        return
    result, number = filled(before, value), number_in(value)
    if result is None or number is None or result.is_meta:
        return
    held = result.detach().item()
    if held != number and (held == held or number == number):  # two NaN are the same
        yield path, number, held, result.dtype
