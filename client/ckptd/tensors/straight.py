# ruff: noqa: TID253
"""Which loaded tensors may be read straight into the live ones: where that is all the write would be, and their only use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

import torch

from ckptd.tensors.tied_values import Target, is_one_tensor, overlapping
from ckptd.tensors.unread import Unread, address_of

_KINDS = (torch.Tensor, torch.nn.Parameter)
_DEVICES = frozenset({"cpu", "cuda"})


def straight(targets: Collection[Target], uses: Counter[int], unread: Unread) -> dict[int, list[Target]]:
    """Address of loaded memory → the one live tensor that gets its bytes, as often as it is a target.

    A loaded tensor that has another use as well (an object gets it, or keeps it; it is written to two places) is read
    into memory of its own first, and so is one whose live tensor is of another kind, or lies across others.

    Args:
        targets: All live tensors that will be written.
        uses: How often the checkpoint has the memory at an address.
        unread: What may still be read anywhere.
    """
    if not unread:
        return {}
    across = {id(target) for group in overlapping(targets) if not is_one_tensor(group) for target in group}
    found: dict[int, list[Target]] = defaultdict(list)
    for target in targets:
        if target.stored is not None and target.stored.numel():
            found[address_of(target.stored)].append(target)
    return {
        address: group
        for address, group in found.items()
        if len(group) == uses[address]
        and all(id(target) not in across and _is_plain(target, unread) for target in group)
        and len({target.live.data_ptr() for target in group}) == 1
    }


def _is_plain(target: Target, unread: Unread) -> bool:
    """Whether the bytes as they are in the file are what live is to hold."""
    live, stored = target.live, target.stored
    return (
        stored is not None
        and target.arrived is not None
        and unread.memory_of(stored) is not None
        and type(live) in _KINDS
        and live.layout is torch.strided
        and live.device.type in _DEVICES
        and (live.dtype, live.shape) == (stored.dtype, stored.shape)
        and ((live.is_contiguous() and stored.is_contiguous()) or _steps(live) == _steps(stored))
        and not (live.is_conj() or live.is_neg() or live.is_inference())
    )


def _steps(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
