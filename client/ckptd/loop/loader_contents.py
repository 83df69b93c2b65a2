# ruff: noqa: TID253
"""What samplers keep in containers: an order, a queue, weights. Recorded where it isn't what it was at first.

Beside it also plain attributes that were made since, or whose kind changed.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from ckptd.errors import StateMismatch
from ckptd.loop.loader_attributes import Holder, is_of_the_system, recordable
from ckptd.loop.loader_kept import MISSING, Kept, check_of
from ckptd.loop.loader_packing import Packing, Unpackable
from ckptd.loop.loader_pouring import MUTABLE, Pouring
from ckptd.loop.loader_unpacking import unpack
from ckptd.snapshot.values import SCALARS
from ckptd.warning import warn_after

_MAX_AT_FIRST: Final = 16 << 20  # bytes kept of what the containers held at first
_KINDS: Final = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    collections.deque,
    bytearray,
    array,
    np.ndarray,
    np.generic,
    torch.Tensor,
)
_SAMPLERS: Final = ("batch_sampler", "sampler")
#: An attribute's entry is [how, …]. It holds the object that it held at first, with this in it; another object, this;
_IN, _OTHER = "in", "other"
#: nothing, it was deleted; something that can't be recorded, which stays as it is.
_GONE, _UNKNOWN = "gone", "unknown"
_NONE: Final[Mapping[str, Any]] = {}
_FORMS: Final = {_IN: 2, _OTHER: 2, _GONE: 1, _UNKNOWN: 1}

Held: TypeAlias = dict[tuple[int, Any], Any]  #: by holder and name, the container itself


def contents_of(
    roots: Mapping[str, Any], samplers: Iterable[tuple[int, Holder]], covered: Callable[[str], bool]
) -> Contents:
    """The contents of the samplers among the roots.

    Args:
        roots: name → object, as a Memory is given them.
        samplers: The holders that belong to samplers, by their numbers, from 1.
        covered: Whether what lies at a path is part of a state_dict.
    """
    plain = {
        name: roots[name] for name in _SAMPLERS if isinstance(roots.get(name), _KINDS) and not covered(name)
    }
    holders = {
        0: Holder("", plain),
        **{number: holder for number, holder in samplers if holder.is_settable()},
    }
    return Contents(holders, [roots.get("dataset")])


class Contents:
    """Containers of plain values in attributes of samplers.

    Args:
        holders: number → what belongs to samplers.
        besides: Objects that aren't the samplers': the dataset.
    """

    def __init__(self, holders: Mapping[int, Holder], besides: Iterable[Any]) -> None:
        self._holders, self._besides = dict(holders), list(besides)
        self._refused: set[tuple[int, Any]] = set()
        self._shared: set[tuple[int, Any]] = set()
        self._said: set[str] = set()
        self._kept: dict[tuple[int, Any], Kept] = {}
        packing, most = Packing(), _MAX_AT_FIRST
        for number, holder in self._holders.items():
            for name, value in holder.items():
                kept = self._kept[number, name] = Kept(holder, value)
                if self._is_ours(holder, name, value):
                    most -= kept.begin(packing, most)
        self.read()  # Which can't be recorded is known from then on.

    def _is_ours(self, holder: Holder, name: Any, value: Any) -> bool:
        """Whether it may be recorded here, if what is in it can be."""
        if type(value) in SCALARS:
            base = holder.baseline.get(name, MISSING)
            known = base is not MISSING and (value is base or recordable(name, base, value))
            return not (known or is_of_the_system(name))
        return isinstance(value, _KINDS) and not any(value is other for other in self._besides)

    def holds(self, number: int, name: Any, value: Any) -> bool:
        """Whether the attribute was recorded, or was as at first, when everything was read last."""
        holder = self._holders.get(number)
        if holder is None:
            return (number, name) in self._shared and self._keeps(value)
        return (number, name) not in self._refused and self._is_ours(holder, name, value)

    def share(self, others: Iterable[tuple[int, Holder]]) -> None:
        """Note which attributes of others hold a container that a sampler keeps: recorded there, it comes back here."""
        self._shared = {
            (number, name) for number, holder in others for name, value in holder.items() if self._keeps(value)
        }  # fmt: skip

    def _keeps(self, value: Any) -> bool:
        """Whether an attribute holds this very container, as it did at first, and it can be recorded."""
        return isinstance(value, MUTABLE) and any(
            kept.first is value and spot not in self._refused
            and self._holders[spot[0]].get(spot[1]) is value
            and self._is_ours(self._holders[spot[0]], spot[1], value)
            for spot, kept in self._kept.items()
        )  # fmt: skip

    def _spots(self) -> Iterator[tuple[int, Any, Any]]:
        """Every attribute: the number of its holder, its name, what it holds; MISSING if it is there no more."""
        for number, holder in self._holders.items():
            now = dict(holder.items())
            yield from ((number, name, value) for name, value in now.items())
            yield from (
                (number, name, MISSING) for at, name in list(self._kept) if at == number and name not in now
            )

    def read(self) -> dict[str, Any]:
        """By path, what isn't as it was at first."""
        found, packing = {}, Packing()
        self._refused = set()
        for number, name, value in self._spots():
            entry = self._read(number, name, value, packing)
            if entry is not None:
                found[self._holders[number].at(name)] = entry
        return found

    def _read(self, number: int, name: Any, value: Any, packing: Packing) -> list[Any] | None:
        holder, kept = self._holders[number], self._kept.get((number, name))
        if value is MISSING:
            return [_GONE] if kept is not None and kept.first is not MISSING else None
        is_new = kept is None or kept.first is MISSING
        if not self._is_ours(holder, name, value):
            was_ours = kept is not None and isinstance(kept.first, _KINDS) and value is not kept.first
            unknown = holder.takes(str(name)) if is_new else was_ours and type(value) not in SCALARS
            return [_UNKNOWN] if unknown else None
        if kept is None and not holder.takes(str(name)):
            self._refused.add((number, name))  # A new loader would have no place for it.
            return None
        if kept is None:
            kept = self._kept[number, name] = Kept(holder, MISSING)
        try:
            if kept.is_as_at_first(value, packing):
                return None
            return [_OTHER if value is not kept.first else _IN, kept.packed]
        except Unpackable:
            self._refused.add((number, name))
            return [_UNKNOWN]

    def check(self, entries: Any) -> None:
        """Whether put would take them.

        Raises:
            StateMismatch: No. Nothing was changed.
        """
        if not isinstance(entries, dict):
            raise StateMismatch(
                "damaged position of a loader", where="loader", seen="contents that are no dict"
            )
        for path, entry in entries.items():
            if not isinstance(entry, list) or not entry or _FORMS.get(str(entry[0])) != len(entry):
                raise StateMismatch(
                    "damaged position of a loader", where=f"loader: {path}", seen=str(entry)[:60]
                )
            if self._place(path) is None:
                raise StateMismatch(
                    "an attribute of the checkpoint has no place", where=f"loader: {path}",
                    todo="make the DataLoader as it was made for the checkpoint",
                )  # fmt: skip
            try:
                unpack(entry[-1])
            except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as fault:
                raise StateMismatch(
                    "damaged position of a loader", where=f"loader: {path}", seen=str(fault)[:200]
                ) from fault

    def _place(self, path: Any) -> tuple[int, Any] | None:
        for number, name in self._kept:
            if self._holders[number].at(name) == path:
                return number, name
        parent, _, name = str(path).rpartition(".")
        for number, holder in self._holders.items():
            if holder.path == parent and holder.takes(name):
                return number, name
        return None

    def held(self) -> Held:
        """The containers that can change, as they are held now."""
        return {
            (number, name): value for number, holder in self._holders.items()
            for name, value in holder.items() if isinstance(value, MUTABLE)
        }  # fmt: skip

    def rebound(self, held: Held) -> list[str]:
        """The paths of those attributes that hold another container now."""
        return sorted(
            self._holders[spot[0]].at(spot[1]) for spot, value in self.held().items()
            if held.get(spot, value) is not value
        )  # fmt: skip

    def put(
        self, entries: Mapping[str, Any], *, leave: Mapping[str, Any] = _NONE, rebound: Collection[str] = ()
    ) -> None:
        """Make every attribute what it was when they were read.

        Args:
            entries: What read gave.
            leave: The same of another time: what couldn't be recorded then stays as it is.
            rebound: The paths of those that get an object of their own: someone goes on with the one they hold now.
        """
        entries = {**entries, **{path: entry for path, entry in leave.items() if entry == [_UNKNOWN]}}
        pouring = Pouring()
        for path in entries:  # those that aren't there yet
            place = self._place(path)
            if place is not None and place not in self._kept:
                self._kept[place] = Kept(self._holders[place[0]], MISSING)
        for number, name, value in list(self._spots()):
            holder, kept = self._holders[number], self._kept.get((number, name))
            path = holder.at(name)
            if path not in entries:
                is_new = kept is None or kept.first is MISSING
                if is_new or self._is_ours(holder, name, value) or value is MISSING:
                    self._put_first(holder, name, value, kept, pouring)
            elif kept is not None and entries[path][0] in (_IN, _OTHER):
                self._put(holder, name, MISSING if path in rebound else value, kept, entries[path], pouring)
            elif entries[path][0] == _GONE and value is not MISSING:
                holder.drop(name)

    def _put(
        self, holder: Holder, name: Any, value: Any, kept: Kept, entry: list[Any], pouring: Pouring
    ) -> None:
        how, packed = entry
        kept.keep()
        wanted, target = check_of(packed), kept.first if how == _IN and kept.first is not MISSING else value
        if how == _OTHER and value is kept.first:
            target = unpack(packed)
        elif kept.check(target) != wanted:
            target = pouring.pour(target, unpack(packed))
        self._set(holder, name, value, target)
        if kept.check(holder.get(name)) != wanted:
            self._say(
                holder.at(name),
                "came back in another order: a set's is that of its history, and of text that of the process",
            )

    def _put_first(self, holder: Holder, name: Any, value: Any, kept: Kept | None, pouring: Pouring) -> None:
        if kept is None or kept.first is MISSING:
            holder.drop(name)
            return
        target, before = kept.first, kept.before() if isinstance(kept.first, _KINDS) else []
        if before is None:
            self._say(holder.at(name), "is too large to go back, in one process, to what it was at first")
        for packed in before or ():
            target = pouring.pour(target, unpack(packed))
        self._set(holder, name, value, target)

    def _set(self, holder: Holder, name: Any, value: Any, target: Any) -> None:
        if target is value:
            return
        if holder.path:
            holder.set(name, target)
        else:  # The DataLoader's own, which doesn't change.
            self._say(holder.at(name), "can't be changed in place to what it was")

    def _say(self, path: str, what: str) -> None:
        if path not in self._said:
            self._said.add(path)
            warn_after(f"{path} of the loader {what}; the batches to come may be others")
