# ruff: noqa: TID253
"""Restoring plain data in place: dicts, lists, tuples, deques, sets, arrays; what they hold is planned one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy

from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS
from ckptd.tensors.capture import has_state_dict
from ckptd.tensors.generator_state import GENERATORS
from ckptd.tensors.live_contents import holds_live, holds_object, is_plain
from ckptd.tensors.registered_restore import plan_fields
from ckptd.tensors.registered_tags import fields_of
from ckptd.tensors.restore_array import plan_array, plan_bytes
from ckptd.tensors.restore_findings import Findings, Held, Write
from ckptd.tensors.restore_kinds import holds_optimizer, object_finder, plan_replaced, same_kind
from ckptd.tensors.tags import is_namedtuple

#: Plans what a container holds: (live, stored, path) → its write.
Plan: TypeAlias = Callable[[Any, Any, Path], Write]

_IF_MADE_SINCE: Final = " (if it was made since: remove it before the restore; strict=False keeps it)"


def plan_data(found: Findings, plan: Plan, live: Any, stored: Any, path: Path) -> Write:
    """The write that brings a live container to the stored one; its kind stays the live one's.

    Where the stored structure is followed, what was another kind is replaced; so is what stands for None.
    """
    if (stored is None or (found.follows and not _is_like(live, stored))) and not holds_object(live):
        return found.given(stored)
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
        return plan_array(found, live, stored, path)
    if isinstance(live, bytearray):
        return plan_bytes(found, live, stored, path)
    if isinstance(live, set):
        return _set(found, live, stored, path)
    return plan_replaced(found, live, stored, path)


def is_written_in_place(value: Any) -> bool:
    """Whether a restore writes into value itself; what else it is given is set in what holds it."""
    if isinstance(value, (MutableMapping, list, deque, set, bytearray, *GENERATORS)) or has_state_dict(value):
        return True
    if isinstance(value, numpy.ndarray):
        return bool(value.flags.writeable)
    return fields_of(value) is not None and not type(value).__dataclass_params__.frozen


def _dict(found: Findings, plan: Plan, live: MutableMapping[Any, Any], stored: Any, path: Path) -> Write:
    if not isinstance(stored, Mapping):
        return found.wrong_kind(live, stored, path)
    kept = [key for key in live if key not in stored and _is_kept(found, live[key], (*path, key))]
    writes = {key: plan(live[key], value, (*path, key)) for key, value in stored.items() if key in live}
    writes = {key: writes.get(key) or found.given(value) for key, value in stored.items()}
    for key in _objects_not_live(live.values(), {key: stored[key] for key in stored if key not in live}):
        found.unused_at((*path, key))
        del writes[key]

    def write() -> Any:
        items = {key: write() for key, write in writes.items()}
        items.update((key, live[key]) for key in kept)
        live.clear()  # then the order of the keys is the stored one too
        live.update(items)
        return live

    return write


def _is_kept(found: Findings, value: Any, path: Path) -> bool:
    """Whether a dict's entry that the checkpoint lacks stays; else it was made since, and goes.

    A tensor may be what new code has and no checkpoint knew, so it stays, which is said or refused. Where the stored
    structure is followed it can't be that.
    """
    if found.strict and (is_plain(value) or (found.follows and not holds_object(value))):
        found.dropped_at(path)
        return False
    found.missing_at(path, "" if holds_object(value) else _IF_MADE_SINCE)
    found.held.append(Held(path, value))
    return True


def _list(found: Findings, plan: Plan, live: list[Any], stored: Any, path: Path) -> Write:
    if not isinstance(stored, list):
        return found.wrong_kind(live, stored, path)
    writes = _items(found, plan, live, stored, path)

    def write() -> Any:
        live[:] = found.shared.lend(stored) if writes is None else [write() for write in writes]
        return live

    return write


def _deque(found: Findings, plan: Plan, live: deque[Any], stored: Any, path: Path) -> Write:
    if type(stored) is not type(live):
        return found.wrong_kind(live, stored, path)
    writes = _items(found, plan, list(live), stored, path)

    def write() -> Any:
        items = found.shared.lend(stored) if writes is None else [write() for write in writes]
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
    if SCALARS.issuperset(map(type, live)) and not any(map(holds_optimizer, stored)):
        return [found.given(value) for value in stored] if len(stored) < 64 else None
    objects = any(map(holds_object, live))
    kept = [i for i in range(len(stored), len(live)) if objects and holds_live(live[i])]
    for index in kept:
        found.missing_at((*path, index))
        found.held.append(Held((*path, index), live[index]))
    with found.following(len(stored) != len(live) and not objects):  # then it is a history, not a fixed set
        writes = [
            plan(item, value, (*path, index))
            for index, (item, value) in enumerate(zip(live, stored, strict=False))
        ]
    more = dict(enumerate(islice(stored, len(live), None), len(live)))
    for index in _objects_not_live(live, more):
        found.unused_at((*path, index))
        del more[index]
    writes += map(found.given, more.values())
    return writes + [_constant(live[index]) for index in kept]


def _objects_not_live(live: Iterable[Any], more: Mapping[Any, Any]) -> list[Any]:
    """The keys of those stored items without counterpart that must have been objects, not data."""
    is_object = object_finder(live if more else ())
    return [key for key, value in more.items() if is_object(value)]


def _tuple(found: Findings, plan: Plan, live: tuple[Any, ...], stored: Any, path: Path) -> Write:
    if not holds_live(live):
        return _replaced_tuple(found, live, stored, path)
    if not isinstance(stored, tuple) or not same_kind(live, stored):
        return found.wrong_kind(live, stored, path)
    if len(stored) != len(live) and found.follows and not holds_object(live):
        return _replaced_tuple(found, live, stored, path)
    if len(stored) != len(live):
        found.problem(path, f"has {len(stored)} items in the checkpoint, {len(live)} in the live state")
        return _constant(live)
    writes = [plan(item, value, (*path, i)) for i, (item, value) in enumerate(zip(live, stored, strict=True))]

    def write() -> Any:
        items = [write() for write in writes]
        same = all(new is old for new, old in zip(items, live, strict=True))
        return live if same else tuple.__new__(type(live), items)

    return write


def _replaced_tuple(found: Findings, live: tuple[Any, ...], stored: Any, path: Path) -> Write:
    write = plan_replaced(found, live, stored, path)
    return lambda: _as_namedtuple(live, write())


def _set(found: Findings, live: set[Any], stored: Any, path: Path) -> Write:
    if type(stored) is not type(live):
        return found.wrong_kind(live, stored, path)

    def write() -> Any:
        live.clear()
        live.update(stored)
        return live

    return write


def _is_like(live: Any, stored: Any) -> bool:
    return type(stored) is type(live) or (isinstance(live, tuple) and same_kind(live, stored))


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
