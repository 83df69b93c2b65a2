# ruff: noqa: TID253
"""Loaded tensors to another device, ties kept; RNG states stay on the CPU."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

from ckptd.tensors.registered_tags import Unbuilt, fields_of

_ON_CPU: Final = "rng"


def moved(components: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """components with every tensor on device. Containers are changed in place."""
    if device.type == "cpu":
        return components
    done: dict[tuple[Any, ...], torch.Tensor] = {}
    return {
        name: value if name == _ON_CPU else _move(value, device, done) for name, value in components.items()
    }


def _move(value: Any, device: torch.device, done: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or place not in done:
            done[place] = value.detach().to(device)
        moved = done[place].detach()
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=value.requires_grad)
        return moved.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _move(item, device, done)
    elif isinstance(value, list):
        value[:] = [_move(item, device, done) for item in value]
    elif isinstance(value, deque):
        for index, item in enumerate(value):
            value[index] = _move(item, device, done)
    elif isinstance(value, tuple):
        items = [_move(item, device, done) for item in value]
        return value if type(value) is torch.Size else tuple.__new__(type(value), items)
    elif isinstance(value, Unbuilt):
        _move(value.content, device, done)
    else:
        for name, item in (fields_of(value) or {}).items():
            object.__setattr__(value, name, _move(item, device, done))
    return value
