# ruff: noqa: TID253
"""Restoring plain data in place: dicts, lists, tuples, deques, sets, arrays; what they hold is planned one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, TypeAlias

import numpy
import torch

from ckptd.snapshot.keypath import Path
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.generator_state import GENERATORS
from ckptd.tensors.registered_restore import plan_fields
from ckptd.tensors.registered_tags import fields_of
from ckptd.tensors.restore_findings import Findings, Target, Write
from ckptd.tensors.tags import is_namedtuple

#: Plans what a container holds: (live, stored, path) → its write.
Plan: TypeAlias = Callable[[Any, Any, Path], Write]

IMMUTABLE_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def plan_data(found: Findings, plan: Plan, live: Any, stored: Any, path: Path) -> Write:
    """The write that brings a live container to the stored one; its kind stays the live one's."""
    if fields_of(live) is not None:
        return plan_fields(live, stored, path, plan) or found.wrong_kind(live, stored, path)
    if isinstance(live, MutableMapping):
        return _dict(found, plan, live, stored, path)
    if isinstance(live, list):
        return _list(found, plan, live, stored, path)
    if isinstance(live, deque):
        return _deque(found, plan, live, stored, path)
    if isinstance(live, tuple):
        return _tuple(found, plan, live, stored, path)
    if isinstance(live, numpy.ndarray):
        return _array(found, live, stored, path)
    if isinstance(live, (set, bytearray)):
        return _refill(found, live, stored, path)
    return _constant(stored)


def _dict(found: Findings, plan: Plan, live: MutableMapping[Any, Any], stored: Any, path: Path) -> Write:
    if not isinstance(stored, Mapping):
        return found.wrong_kind(live, stored, path)
    kept = [key for key in live if key not in stored]
    for key in kept:
        found.missing_at((*path, key))
    writes = {
        key: plan(live[key], value, (*path, key)) if key in live else _constant(value)
        for key, value in stored.items()
    }

    def write() -> Any:
        items = {key: write() for key, write in writes.items()}
        items.update((key, live[key]) for key in kept)
        live.clear()  # then the order of the keys is the stored one too
        live.update(items)
        return live

    return write


def _list(found: Findings, plan: Plan, live: list[Any], stored: Any, path: Path) -> Write:
    if not isinstance(stored, list):
        return found.wrong_kind(live, stored, path)
    writes = _items(found, plan, live, stored, path)

    def write() -> Any:
        live[:] = stored if writes is None else [write() for write in writes]
        return live

    return write


def _deque(found: Findings, plan: Plan, live: deque[Any], stored: Any, path: Path) -> Write:
    if type(stored) is not type(live):
        return found.wrong_kind(live, stored, path)
    writes = _items(found, plan, list(live), stored, path)

    def write() -> Any:
        items = stored if writes is None else [write() for write in writes]
        if live.maxlen != stored.maxlen:  # which can't be changed in place
            return deque(items, stored.maxlen)
        live.clear()
        live.extend(items)
        return live

    return write


def _items(
    found: Findings, plan: Plan, live: list[Any], stored: Sequence[Any], path: Path
) -> list[Write] | None:
    """A write for each stored item, by position; None where all are taken as they are stored."""
    if IMMUTABLE_SCALARS.issuperset(map(type, live)):
        return [_constant(value) for value in stored] if len(stored) < 64 else None
    for index in range(len(stored), len(live)):
        if holds_live(live[index]):
            found.missing_at((*path, index))
    return [
        plan(live[index], value, (*path, index)) if index < len(live) else _constant(value)
        for index, value in enumerate(stored)
    ]


def _tuple(found: Findings, plan: Plan, live: tuple[Any, ...], stored: Any, path: Path) -> Write:
    if not holds_live(live):
        return lambda: _as_namedtuple(live, stored)
    if not isinstance(stored, tuple) or len(stored) != len(live):
        return found.wrong_kind(live, stored, path)
    writes = [plan(item, value, (*path, i)) for i, (item, value) in enumerate(zip(live, stored, strict=True))]

    def write() -> Any:
        items = [write() for write in writes]
        same = all(new is old for new, old in zip(items, live, strict=True))
        return live if same else tuple.__new__(type(live), items)

    return write


def _refill(found: Findings, live: Any, stored: Any, path: Path) -> Write:
    if type(stored) is not type(live):
        return found.wrong_kind(live, stored, path)

    def write() -> Any:
        live.clear()
        live.update(stored) if isinstance(live, set) else live.extend(stored)
        return live

    return write


def _array(found: Findings, live: numpy.ndarray, stored: Any, path: Path) -> Write:
    same = isinstance(stored, numpy.ndarray) and stored.shape == live.shape and stored.dtype == live.dtype
    if not same or not live.flags.writeable:
        return _constant(stored)
    if live.flags.c_contiguous and live.nbytes:  # it may share its memory with a tensor of the state
        found.targets.append(Target(path, _bytes_of(live), _bytes_of(numpy.array(stored, order="C"))))

    def write() -> Any:
        live[...] = stored
        return live

    return write


def _bytes_of(array: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1).view(numpy.uint8))


def holds_live(value: Any, depth: int = 0) -> bool:
    """Whether something in value is restored in place: a tensor, module, generator or other object."""
    if isinstance(
        value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, *GENERATORS)
    ) or has_state_dict(value):
        return True
    if depth >= 100:
        return False
    if isinstance(value, (list, tuple, deque)):
        return any(holds_live(item, depth + 1) for item in value)
    items = value if isinstance(value, Mapping) else fields_of(value) or {}
    return any(holds_live(item, depth + 1) for item in items.values())


def _constant(value: Any) -> Write:
    return lambda: value


def _as_namedtuple(live: Any, stored: Any) -> Any:
    """stored as the live class, where it was read as one that only looks like it."""
    kind = type(live)
    if (
        is_namedtuple(kind)
        and isinstance(stored, tuple)
        and getattr(type(stored), "_fields", None) == kind._fields
    ):
        return tuple.__new__(kind, stored)
    return stored
