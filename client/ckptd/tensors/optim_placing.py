# ruff: noqa: TID253
"""Where a stored tensor of an optimizer goes: into the tensor that is there, or in its place; on which device."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

import torch

from ckptd.tensors.optim_setting import filled, is_number, number_in, same_items
from ckptd.tensors.optim_storable import extent, place

#: Single numbers that torch keeps on the host unless a kernel on the device reads them.
_ON_HOST: Final = frozenset({"step", "mu_product"})


class Placing:
    """Puts stored values where live ones are, for one optimizer.

    A tensor that fits is written into the live one: CUDA graphs, schedulers and `defaults` hold it. That is
    done only while no two stored tensors would meet in one live memory; tensors that were one are one again.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], arrived: Collection[int] = ()) -> None:
        #: Live tensors that were written into, each with what it holds now.
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._taken: dict[torch.device, list[tuple[int, int]]] = {}
        self._placed: dict[Any, torch.Tensor] = {}
        self._sources: list[torch.Tensor] = []  # kept alive: their addresses are the keys
        self._arrived = arrived  # ids of live tensors that hold the stored bytes already
        for parameter in parameters:
            self._take(parameter)

    def state(self, saved: Any, before: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
        """The state of one parameter as its optimizer keeps it; moments keep their dtype."""

        def place_one(key: Any, value: torch.Tensor, old: Any) -> torch.Tensor:
            return self._tensor(
                step_of_fused(key, value, group), old, _device(key, value, old, parameter, group)
            )

        return rebuild(saved, before, place_one)

    def own(self, saved: Any, before: Any) -> Any:
        """State under a key of the optimizer's own, that is no parameter's."""
        return rebuild(
            saved, before, lambda key, value, old: self._tensor(value, old, _same_device(value, old))
        )

    def setting(self, before: Any, value: Any) -> Any:
        """A setting of a group, or one item of it, as the kind that the live one is: number or tensor."""
        if same_items(before, value):
            items = [self.setting(old, item) for old, item in zip(before, value, strict=True)]
            return tuple.__new__(type(value), items) if isinstance(value, tuple) else type(value)(items)
        if isinstance(value, torch.Tensor) and is_number(before) and (number := number_in(value)) is not None:
            return number
        if (new := filled(before, value)) is not None:
            return self._tensor(new, before, before.device, value)
        return self.own(value, before)

    def _tensor(
        self, value: torch.Tensor, before: Any, device: torch.device, stored: Any = None
    ) -> torch.Tensor:
        """value in before, or in its place; stored is the tensor that it was made of, if it was of one."""
        stored = stored if isinstance(stored, torch.Tensor) else value
        key = (place(stored), device) if stored.layout is torch.strided and stored.numel() else None
        if key in self._placed:
            return self._placed[key]
        if can_take(before, value, device) and self._claim(before):
            alike = (stored.shape, stored.dtype) == (value.shape, value.dtype)
            self.written.append((before, stored if alike else value))
            result = self._write(before, value)
        else:
            result = self._move(value, device)
        if key is not None:
            self._placed[key] = result
            self._sources.append(stored)
        return result

    def _write(self, before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Onto itself it is nothing but a new version: a graph that saved it must see the change.
        return before.copy_(before if id(before) in self._arrived else value)

    def _move(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        return value.to(device)

    def _claim(self, tensor: torch.Tensor) -> bool:
        """Take the memory of a live tensor, unless a part of it is taken."""
        if not _has_memory(tensor):
            return True
        spans, (start, end) = self._taken.setdefault(tensor.device, []), extent(tensor)
        first, after = _meeting(spans, start, end)
        if first == after:
            spans.insert(first, (start, end))
        return first == after

    def _take(self, tensor: torch.Tensor) -> None:
        if _has_memory(tensor):
            spans, (start, end) = self._taken.setdefault(tensor.device, []), extent(tensor)
            first, after = _meeting(spans, start, end)
            met = [*spans[first:after], (start, end)]
            spans[first:after] = [(min(met)[0], max(span[1] for span in met))]


class Rehearsal(Placing):
    """Says by `written` what a Placing would write where, and writes nothing."""

    def _write(self, before: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return before

    def _move(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        return value


def _meeting(spans: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """The range of spans that have an address in common with this one; they have none with each other."""
    after = bisect_left(spans, (end,))
    first = after
    while first and spans[first - 1][1] > start:
        first -= 1
    return first, after


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta


def can_take(before: Any, value: torch.Tensor, device: torch.device) -> bool:
    """Whether value can be written into before, a tensor on that device, and nothing is lost by it.

    Not into what hangs on a graph (differentiable=True), can't be written, or shows a byte twice.
    """
    same = (
        type(before) is type(value)
        and before.shape == value.shape
        and before.dtype == value.dtype
        and before.device == device
        and before.layout is value.layout is torch.strided
        and before.stride() == value.stride()
        and before.requires_grad == value.requires_grad
    )
    return (
        same
        and before.grad_fn is None
        and not before.is_inference()
        and (before.is_contiguous() or 0 not in before.stride())
    )


def _device(
    key: Any, value: torch.Tensor, before: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.device:
    if key in _ON_HOST and value.dim() == 0:
        return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    return before.device if isinstance(before, torch.Tensor) else parameter.device


def _same_device(value: torch.Tensor, before: Any) -> torch.device:
    return before.device if isinstance(before, torch.Tensor) else value.device


def step_of_fused(key: Any, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """value; the count of steps in the one dtype that fused kernels read, where the group is fused."""
    return value.to(torch.float32) if key == "step" and group.get("fused") and value.dim() == 0 else value


def rebuild(saved: Any, before: Any, visit: Callable[[Any, torch.Tensor, Any], Any], key: Any = None) -> Any:
    """saved in containers of its own, every tensor replaced by visit(key, tensor, the live value there).

    The stored containers are left alone. The key of a list's or tuple's items is that of the list.
    """
    if isinstance(saved, torch.Tensor):
        return visit(key, saved, before)
    if isinstance(saved, dict):
        ours = before if isinstance(before, Mapping) else {}
        result = copy.copy(saved)
        for name, item in saved.items():  # not update(): a Counter's would add
            result[name] = rebuild(item, ours.get(name), visit, name)
        return result
    if isinstance(saved, (list, tuple, deque)):
        theirs = before if isinstance(before, (list, tuple, deque)) and len(before) == len(saved) else None
        items = [
            rebuild(item, None if theirs is None else theirs[index], visit, key)
            for index, item in enumerate(saved)
        ]
        if isinstance(saved, tuple):
            return tuple.__new__(type(saved), items)
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    return saved
