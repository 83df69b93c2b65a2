# ruff: noqa: TID253
"""Slots as pinned memory: CUDA copies into them without the host's help, and without waiting for it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

from ckptd.snapshot.mapped_memory import MappedMemory

__all__ = ["pin", "pin_reserved"]

log = logging.getLogger(__name__)

_DONE: Final = 0  # cudaSuccess
_FOR_ALL_DEVICES: Final = 1  # cudaHostRegisterPortable
_refused: Final[weakref.WeakSet[MappedMemory]] = weakref.WeakSet()


def pin_reserved(memories: Iterable[memoryview]) -> None:
    """Pin what is reserved where the trainer uses CUDA: it takes long, and the first snapshot shouldn't."""
    if _uses_cuda():
        for memory in memories:
            pin(memory)


def pin(memory: memoryview, *, runtime: Any = None) -> bool:
    """Register all of the map that `memory` views with CUDA; it is given back before the map goes.

    Args:
        memory: A view of a MappedMemory. Any other memory is left as it is.
        runtime: torch.cuda.cudart(), or what stands for it.

    Returns:
        Whether it is pinned. When not, copies into it are right all the same; the host waits while they run.
    """
    mapping = memory.obj
    if not isinstance(mapping, MappedMemory):
        return False
    if mapping.before_unmap is not None or mapping in _refused:
        return mapping not in _refused
    runtime = runtime or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with memoryview(mapping) as whole:
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        size = len(whole)
    refused = int(runtime.cudaHostRegister(address, size, _FOR_ALL_DEVICES))
    if refused != _DONE:
        log.warning("slot.not_pinned bytes=%d cuda_error=%d", size, refused)
        _refused.add(mapping)
        _clear_error()
        return False
    # A view may outlive close(): then the map goes with it, and this comes just before that.
    mapping.before_unmap = weakref.finalize(mapping, _unpin, runtime, address)
    return True


def _clear_error() -> None:
    """CUDA keeps the refusal, and torch would raise it from the trainer's next kernel: a small one takes it."""
    if _uses_cuda():
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _unpin(runtime: Any, address: int) -> None:
    freed = int(runtime.cudaHostUnregister(address))
    if freed != _DONE:
        log.warning("slot.not_unpinned cuda_error=%d", freed)
