# ruff: noqa: TID253
"""What a live value holds, at any depth: objects, tensors and arrays, or plain data alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy
import torch

from ckptd.snapshot.values import SCALARS
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.generator_state import GENERATORS
from ckptd.tensors.registered_tags import branches_below

_Is: TypeAlias = Callable[[Any], bool]


def holds_object(value: Any) -> bool:
    """Whether value is or holds an object with a state of its own, or a generator: what no checkpoint can make."""
    return holds(value, _is_object)


def holds_live(value: Any) -> bool:
    """Whether something in value is restored in place: a tensor, module, generator or other object."""
    return holds(value, lambda one: isinstance(one, torch.Tensor) or _is_object(one))


def is_plain(value: Any) -> bool:
    """Whether value is data alone: neither objects nor tensors nor arrays are in it."""
    return not holds(value, lambda one: isinstance(one, (torch.Tensor, numpy.ndarray)) or _is_object(one))


def _is_object(value: Any) -> bool:
    return isinstance(value, GENERATORS) or has_state_dict(value)


def holds(value: Any, is_one: _Is) -> bool:
    """Whether value is one that is_one is true of, or holds one."""
    # No function that calls itself: its cell would keep all that was seen alive until the next collection.
    seen: dict[int, Any] = {}  # what stands in many places, or in itself, is looked into once
    todo = [(value, 0)]
    while todo:
        one, depth = todo.pop()
        if type(one) in SCALARS or id(one) in seen:
            continue
        seen[id(one)] = one
        if is_one(one):
            return True
        if depth < 100:
            todo += ((item, depth + 1) for _, item in branches_below(one))
    return False
