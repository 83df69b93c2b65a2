# ruff: noqa: TID253
"""Values put back in place, so that whoever else holds a container, and an iterator that runs over it, goes on with it."""

from __future__ import annotations

import collections
from array import array
from typing import Any, Final

import numpy as np
import torch

from ckptd.loop.loader_packing import DICTS
from ckptd.loop.loader_unpacking import arrange

#: Kinds whose content can be changed.
MUTABLE: Final = (list, collections.deque, set, bytearray, array, np.ndarray, torch.Tensor, *DICTS.values())


class Pouring:
    """Makes live values what others are. One live container takes the place of one other only."""

    def __init__(self) -> None:
        self._used: set[int] = set()

    def pour(self, live: Any, wanted: Any) -> Any:
        """The live value, changed, or, where it can't become that, the wanted one, to be set in its place."""
        if type(live) is not type(wanted):
            return wanted
        if type(live) is tuple:
            items = self._items(live, wanted)
            return live if len(live) == len(items) and all(map(_is, live, items)) else tuple(items)
        if type(live) not in MUTABLE or id(live) in self._used:
            return wanted
        self._used.add(id(live))
        try:
            return live if self._fill(live, wanted) else wanted
        except (BufferError, RuntimeError):  # its memory is shown by something else, or shows itself twice
            return wanted

    def _fill(self, live: Any, wanted: Any) -> bool:
        if isinstance(live, np.ndarray):
            return _fill_array(live, wanted)
        if isinstance(live, torch.Tensor):
            return _fill_tensor(live, wanted)
        if isinstance(live, array):
            if live.typecode == wanted.typecode:
                live[:] = wanted
            return bool(live.typecode == wanted.typecode)
        if isinstance(live, dict):
            return self._fill_dict(live, wanted)
        if isinstance(live, collections.deque):
            return self._fill_deque(live, wanted)
        if isinstance(live, set):
            arrange(live, list(wanted))
        else:
            live[:] = self._items(live, wanted) if isinstance(live, list) else wanted
        return True

    def _items(self, live: Any, wanted: Any) -> list[Any]:
        items = list(wanted)
        for number, old in enumerate(live):
            if number == len(items):
                break
            items[number] = self.pour(old, items[number])
        return items

    def _fill_deque(self, live: collections.deque[Any], wanted: collections.deque[Any]) -> bool:
        if live.maxlen != wanted.maxlen:
            return False
        items = self._items(list(live), wanted)
        if len(items) != len(live) or not all(map(_is, live, items)):
            live.clear()
            live.extend(items)
        return True

    def _fill_dict(self, live: dict[Any, Any], wanted: dict[Any, Any]) -> bool:
        if getattr(live, "default_factory", None) is not getattr(wanted, "default_factory", None):
            return False
        items = {key: self.pour(dict.get(live, key), value) for key, value in wanted.items()}
        if [(type(key), key) for key in live] != [(type(key), key) for key in items]:
            live.clear()
        for key, value in items.items():
            live[key] = value
        return True


def _is(one: Any, other: Any) -> bool:
    return one is other


def _fill_array(live: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> bool:
    fits = live.flags.writeable and (live.dtype, live.shape) == (wanted.dtype, wanted.shape)
    if fits:
        live[...] = wanted
    return fits


def _fill_tensor(live: torch.Tensor, wanted: torch.Tensor) -> bool:
    fits = (live.dtype, live.shape) == (wanted.dtype, wanted.shape) and not (
        live.is_inference() or live.requires_grad
    )
    if fits:
        with torch.no_grad():
            live.copy_(wanted)
    return fits
