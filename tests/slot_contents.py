"""What a reader of a slot finds for a row of a captured state."""

from __future__ import annotations

import torch

from ckptd.tensors.capture import Captured


def stored(captured: Captured, number: int, buffer: bytearray) -> torch.Tensor:
    """The tensor of this row, by its own dtype, shape and stride."""
    row = captured.tensors[number]
    dtype = getattr(torch, row.dtype)
    if not row.nbytes:
        return torch.empty(row.shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)[row.offset : row.offset + row.nbytes]
    typed = flat.clone().view(dtype)
    return typed.view(row.shape) if row.stride is None else typed.as_strided(row.shape, row.stride)
