# ruff: noqa: TID253
"""Tensors that an object or a container shares with another component: one memory again, once both are restored.

An object keeps the tensors that its load_state_dict is given, and a container those that are set in it, while
optimizers and modules keep their live ones and take the values. In torch 2.6 a schedule's `base_lrs` may be the very
tensor that is the group's rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ckptd.snapshot.values import SCALARS
from ckptd.tensors.optim_placing import rebuild
from ckptd.tensors.optim_storable import place
from ckptd.tensors.tied_values import same_bits


class SharedTensors:
    """Of one restore: what is given of stored tensors that are another component's as well."""

    def __init__(self) -> None:
        self._places: set[Any] = set()
        self._lent: list[tuple[torch.Tensor, Any]] = []
        self._moved: dict[Any, torch.Tensor] = {}

    def expect(self, stored: Iterable[Any]) -> None:
        """Note, before objects are given anything, the stored tensors that live ones take the values of."""
        self._places.update(place(tensor) for value in stored for tensor in _tensors(value))

    def lend(self, stored: Any) -> Any:
        """What an object's load_state_dict or a container gets: stored, with tensors of its own for the shared ones."""
        if all(place(tensor) not in self._places for tensor in _tensors(stored)):
            return stored
        return rebuild(stored, None, self._lend)

    def lend_on(self, device: torch.device, stored: torch.Tensor) -> torch.Tensor:
        """The same on a device, where tensors that are one are one again."""
        if stored.device == device or not list(_tensors(stored)):
            moved: torch.Tensor = self.lend(stored.to(device))
            return moved
        where = place(stored)
        own = self._moved.setdefault((where, device), stored.to(device)).detach()
        own.requires_grad_(stored.requires_grad)
        self._lent.append((own, where))
        return own

    def _lend(self, key: Any, tensor: torch.Tensor, before: Any) -> torch.Tensor:
        for each in _tensors(tensor):
            # detach() makes another tensor over the same memory: whoever holds the stored one keeps it.
            own = each if each.requires_grad or isinstance(each, torch.nn.Parameter) else each.detach()
            self._lent.append((own, place(each)))
            return own
        return tensor

    def retie(self, written: Iterable[tuple[Any, Any]]) -> None:
        """Let each tensor that was lent lie where the live one lies, once both are restored.

        What an object made of it (a copy, a number, another value) isn't changed, and what wasn't tied when it was saved is
        never made so.

        Args:
            written: Stored and live value of every place that was restored, each a tensor or a tree of them.
        """
        live: dict[Any, torch.Tensor] = {}
        if self._lent:
            for stored, now in written:
                for one, other in _pairs(stored, now):
                    live.setdefault(place(one), other)
        for tensor, where in self._lent:
            now = live.get(where)
            if now is not None and now.data_ptr() != tensor.data_ptr() and _is_equal(tensor, now):
                tensor.data = now.detach()


def _is_equal(tensor: torch.Tensor, now: torch.Tensor) -> bool:
    return (
        tensor.dtype == now.dtype
        and tensor.shape == now.shape
        and now.layout is torch.strided
        and same_bits(tensor.cpu(), now.cpu())
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor below that has memory of its own."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.numel() and not value.is_meta:
            yield value
    elif isinstance(value, (Mapping, list, tuple, deque)):
        for item in value.values() if isinstance(value, Mapping) else value:
            if type(item) not in SCALARS:  # a history of losses is long
                yield from _tensors(item)


def _pairs(stored: Any, live: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(stored, torch.Tensor):
        if isinstance(live, torch.Tensor):
            yield from ((tensor, live) for tensor in _tensors(stored))
        return
    ours = _items(live)
    for key, item in _items(stored).items():
        if key in ours:
            yield from _pairs(item, ours[key])


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, (list, tuple, deque)) else {}
