# ruff: noqa: TID253
"""Whether a stored value is of a kind that may replace the live one, for what isn't restored in place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy
import torch

from ckptd.snapshot.keypath import Path
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.live_contents import holds
from ckptd.tensors.optim import SHAPES, is_torch_form
from ckptd.tensors.restore_findings import Findings, Write
from ckptd.tensors.tags import is_namedtuple


def plan_replaced(found: Findings, live: Any, stored: Any, path: Path) -> Write:
    """The write of a value that is set in what holds it; another kind is refused when strict, else taken over."""
    if live is None and holds_optimizer(stored):
        found.unused_at(path)
        return lambda: live
    if not found.follows and not same_kind(live, stored):
        return found.other_kind(live, stored, path)
    return found.given(stored)


def same_kind(live: Any, stored: Any) -> bool:
    """Whether stored may stand where live stands.

    None goes with everything, on either side: it is "no value yet". A number goes with every number, be it of
    NumPy or a tensor or array of one element. Text, bytes and tuples (of any length) go with their like, a
    namedtuple with one of the same fields, and everything else with its own type.
    """
    if live is None or stored is None:
        return True
    if isinstance(live, enum.Enum):
        return type(stored) is type(live)
    if is_number(live):
        return is_number(stored) or _is_one_element(stored)
    for kind in (str, bytes, tuple):
        if isinstance(live, kind):
            return isinstance(stored, kind) and _same_fields(live, stored)
    return type(stored) is type(live)


def is_number(value: Any) -> bool:
    """Whether value is a number of Python or NumPy; a bool is one too."""
    return isinstance(value, (bool, int, float, complex, numpy.number, numpy.bool_))


def _is_one_element(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, numpy.ndarray) and value.size == 1


def _same_fields(live: Any, stored: Any) -> bool:
    return not is_namedtuple(type(live)) or getattr(type(stored), "_fields", None) == type(live)._fields


def object_finder(siblings: Iterable[Any]) -> Callable[[Any], bool]:
    """What tells whether a stored item that has only these beside it is the state of an object that isn't live.

    It is when there are objects among them, and it looks like the state of a module or an optimizer, or is a dict
    where all beside it are objects. Next to plain data alone it is data, but for an optimizer's own: nothing tells
    the copy of a module's state that a script keeps from a module's own.
    """
    holders = [_holds_object(one) for one in siblings]
    if not any(holders):
        return holds_optimizer
    return lambda stored: _holds_state(stored) or (all(holders) and _holds_dict(stored))


def holds_optimizer(value: Any) -> bool:
    """Whether an optimizer's state is in value, stored as none but an optimizer's own is: it can't become a dict."""
    return holds(value, lambda one: isinstance(one, Mapping) and SHAPES in one and is_torch_form(one))


def _holds_object(value: Any) -> bool:
    return holds(value, has_state_dict)


def _holds_state(value: Any) -> bool:
    return holds(
        value, lambda one: isinstance(one, Mapping) and (hasattr(one, "_metadata") or is_torch_form(one))
    )


def _holds_dict(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, tuple) and depth < 100 and any(_holds_dict(item, depth + 1) for item in value)
