# ruff: noqa: TID253
"""The one copy: from the live tensors into a slot's memory.

A tensor whose bytes lie in memory as they will be stored is moved as bytes, large ones by several threads; any other
(strided, on another device) is copied by torch, in the calling thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Final

import numpy
import torch

from ckptd.errors import InvalidArgument, UnstorableState
from ckptd.snapshot import keypath
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.tensors.copy_threads import CopyThreads, Move
from ckptd.tensors.torch_support import BITS_BY_ITEMSIZE

#: Moves of fewer bytes are made by the calling thread: threads would only wait for the interpreter's lock between them.
_SMALL_BYTES: Final = 128 * 1024


def copy_tensors(
    rows: Sequence[TensorSpec],
    sources: Sequence[torch.Tensor],
    buffer: memoryview | numpy.ndarray,
    threads: CopyThreads | None = None,
) -> None:
    """Copy every source to the offset of its row, bit for bit, whatever its dtype, device and strides.

    No reference to the buffer or a source outlives the call, so a map can be closed after it.

    Args:
        rows: What the sources are; aliases among them have none.
        sources: One for each row that isn't an alias, in the order of the rows.
        buffer: Where to.
        threads: Who helps with what is large. None: nobody.

    Raises:
        InvalidArgument: The buffer is too small or read-only; nothing was copied.
        UnstorableState: A source isn't any more what its row says; the buffer's contents are undefined.
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
    owned = (row for row in rows if row.alias_of is None)
    large, small, others = _sorted_out(zip(owned, sources, strict=True), region.ctypes.data)

    def by_this_thread() -> None:
        for to, source, nbytes in zip(*small, strict=True):
            ctypes.memmove(to, source, nbytes)
        if others:
            base = torch.from_numpy(region)
            with torch.no_grad():
                for row, other in others:
                    _copy(row, other, base)

    if large:
        (threads or CopyThreads(0)).move(large, by_this_thread)
    else:
        by_this_thread()


def _sorted_out(
    pairs: Iterable[tuple[TensorSpec, torch.Tensor]], start: int
) -> tuple[list[Move], tuple[list[int], list[int], list[int]], list[tuple[TensorSpec, torch.Tensor]]]:
    """Moves of large tensors; those of small ones, by column; and what isn't a move of bytes.

    In columns, 100,000 moves are three objects to the collector, which would begin in mid-snapshot for as many tuples.
    """
    large: list[Move] = []
    small: tuple[list[int], list[int], list[int]] = ([], [], [])
    others = []
    for row, source in pairs:
        nbytes = row.nbytes
        if not nbytes:
            continue
        if (
            source.is_cpu
            and (row.stride is not None or source.is_contiguous())
            and not source.is_conj()
            and not source.is_neg()
        ):
            address = source.data_ptr()
            if (
                not address or source.nbytes != nbytes
            ):  # the memory was given back since, or is another tensor's
                raise UnstorableState("changed while the snapshot was taken", where=keypath.show(row.path))
            if nbytes >= _SMALL_BYTES:
                large.append((start + row.offset, address, nbytes))
            else:
                small[0].append(start + row.offset)
                small[1].append(address)
                small[2].append(nbytes)
        else:
            others.append((row, source))
    return large, small, others


def _copy(row: TensorSpec, source: torch.Tensor, base: torch.Tensor) -> None:
    bits = source.view(BITS_BY_ITEMSIZE[row.itemsize])
    place = base[row.offset : row.offset + row.nbytes].view(bits.dtype)
    if row.stride is not None or bits.is_contiguous():
        count = bits.numel()
        place.copy_(bits.as_strided((count,), (1,)))
    else:
        place.view(bits.shape).copy_(bits)
