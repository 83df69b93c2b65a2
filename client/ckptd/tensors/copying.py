# ruff: noqa: TID253
"""The one copy: from the live tensors into a slot's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from ckptd.errors import InvalidArgument
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.tensors.torch_support import BITS_BY_ITEMSIZE


def copy_tensors(
    rows: Sequence[TensorSpec], sources: Sequence[torch.Tensor], buffer: memoryview | numpy.ndarray
) -> None:
    """Copy every source to the offset of its row, bit for bit, whatever its dtype, device and strides.

    No reference to the buffer outlives the call, so a map can be closed after it.

    Raises:
        InvalidArgument: The buffer is too small or read-only; nothing was copied.
    """
    region = (
        numpy.frombuffer(buffer, dtype=numpy.uint8)
        if isinstance(buffer, memoryview)
        else buffer.view(numpy.uint8)
    )
    needed = max((row.offset + row.nbytes for row in rows), default=0)
    if region.nbytes < needed or not region.flags.writeable:
        raise InvalidArgument(
            "can't take the snapshot",
            where="buffer",
            seen=f"{region.nbytes} bytes, writeable={region.flags.writeable}",
            wanted=f"{needed} writeable bytes",
        )
    if needed == 0:
        return
    base = torch.from_numpy(region)
    owned = (row for row in rows if row.alias_of is None)
    with torch.no_grad():
        for row, source in zip(owned, sources, strict=True):
            if row.nbytes:
                _copy(row, source, base)


def _copy(row: TensorSpec, source: torch.Tensor, base: torch.Tensor) -> None:
    bits = source.view(BITS_BY_ITEMSIZE[row.itemsize])
    place = base[row.offset : row.offset + row.nbytes].view(bits.dtype)
    if row.stride is not None or bits.is_contiguous():
        count = bits.numel()
        place.copy_(bits.as_strided((count,), (1,)))
    else:
        place.view(bits.shape).copy_(bits)
