"""The strides a tensor has when nothing else is said."""

from __future__ import annotations

from collections.abc import Sequence


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, that torch gives a tensor of this shape in C order."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
