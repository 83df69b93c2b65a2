# ruff: noqa: TID253
"""The copy of one captured state into a slot: all at once, or what only a step changes beside the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from ckptd.tensors.background_copy import BackgroundCopy, Batch, CopyThread
from ckptd.tensors.capture import Captured
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.copying import copy_tensors
from ckptd.tensors.deferring import Deferred
from ckptd.tensors.device_copy import DeviceCopy, Pairs, has_side_stream
from ckptd.tensors.pinned_memory import pin
from ckptd.tensors.step_gate import gate
from ckptd.tensors.torch_support import BITS_BY_ITEMSIZE

__all__ = ["copy_at_once", "copy_beside"]


@dataclass(slots=True)
class _Part:
    """What comes from one device."""

    now: Batch = field(default_factory=list)
    later: Batch = field(default_factory=list)


def copy_at_once(captured: Captured, memory: memoryview, threads: CopyThreads | None = None) -> None:
    """Copy every tensor to its offset; returns when all have arrived.

    Raises:
        InvalidArgument: The memory is too small or read-only. Nothing was copied.
    """
    if not any(map(has_side_stream, captured.sources)):
        copy_tensors(captured.tensors, captured.sources, memory, threads)
        return
    host, devices = _by_device(captured, None)
    under_way = _begin(devices, memory)
    _copy(host.now, memory, threads)
    for copy in under_way:
        copy.wait()


def copy_beside(
    captured: Captured, deferred: Deferred, memory: memoryview, *,
    thread: CopyThread, threads: CopyThreads | None = None, ended: Callable[[], None],
) -> BackgroundCopy:  # fmt: skip
    """Copy what must be copied now, and begin with the rest; the next step of any optimizer waits for it.

    What comes from a CUDA device, whatever it is, is ordered before what the trainer does there next.

    Args:
        captured: The state.
        deferred: What can wait.
        memory: Where to. It must stay until the copy has ended.
        thread: Who copies the rest.
        threads: Who helps with what is copied now, and whoever must wait for the rest.
        ended: Called once no step has to wait any more, whether it went well or not, where nobody waits for it: it may
            take any lock.
    """

    def let_steps_pass(copy: BackgroundCopy) -> None:
        gate.drop(copy)
        thread.follow(ended)

    host, devices = _by_device(captured, deferred.waits)
    under_way = _begin(devices, memory)
    _copy(host.now, memory, threads)
    copy = BackgroundCopy(host.later, under_way, memory, threads=threads, ended=let_steps_pass)
    gate.hold(copy, deferred.modules)
    try:
        thread.begin(copy)
    except BaseException:
        gate.drop(copy)
        raise
    return copy


def _by_device(captured: Captured, waits: Sequence[bool] | None) -> tuple[_Part, dict[torch.device, _Part]]:
    host, devices = _Part(), dict[torch.device, _Part]()
    owned = (row for row in captured.tensors if row.alias_of is None)
    for number, (row, source) in enumerate(zip(owned, captured.sources, strict=True)):
        on_cuda = has_side_stream(source)
        part = devices.setdefault(source.device, _Part()) if on_cuda else host
        can_wait = waits is not None and waits[number] and (on_cuda or source.is_cpu)
        if can_wait:
            part.later.append(
                (row, source.detach())
            )  # what is copied stays, whatever the caller's tensor is made to show
        else:
            part.now.append((row, source))
    return host, devices


def _begin(devices: dict[torch.device, _Part], memory: memoryview) -> list[DeviceCopy]:
    if not devices:
        return []
    pin(memory)
    base = torch.from_numpy(numpy.frombuffer(memory, dtype=numpy.uint8))
    return [
        DeviceCopy(device, _pairs(part.now, base), _pairs(part.later, base))
        for device, part in devices.items()
    ]


def _pairs(part: Batch, base: torch.Tensor) -> Pairs:
    pairs: list[Any] = []
    for row, source in part:
        if row.nbytes:
            bits = source.view(BITS_BY_ITEMSIZE[row.itemsize])
            place = base[row.offset : row.offset + row.nbytes].view(bits.dtype)
            if row.stride is not None or bits.is_contiguous():
                pairs.append((place, bits.as_strided((bits.numel(),), (1,))))
            else:
                pairs.append((place.view(bits.shape), bits))
    return pairs


def _copy(part: Batch, memory: memoryview, threads: CopyThreads | None) -> None:
    copy_tensors([row for row, _ in part], [source for _, source in part], memory, threads)
