# ruff: noqa: TID253
"""A dense tensor as the bytes that it lies in."""

from __future__ import annotations

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's bytes in the order of its memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The same of one on the CPU."""
    return memoryview(flat(tensor).numpy().data)
