# ruff: noqa: TID253
"""Copies from CUDA devices: on a stream of their own, beside what the trainer computes.

The side stream first waits for the trainer's stream, so that it reads what was computed until now. The host waits
for an event behind the last copy, never for a whole device. Whoever changes a tensor on the trainer's stream while it
is read lets that stream wait for an event; the host goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = ["DeviceCopy", "Pairs", "has_side_stream"]

#: Places in the slot, and the tensors to copy to them.
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]

_lock: Final = threading.RLock()  # a signal's handler may come here too
_streams: Final[dict[torch.device, Any]] = {}


def has_side_stream(tensor: torch.Tensor) -> bool:
    """Whether it lies where copies can run beside the trainer's work."""
    return tensor.is_cuda


class DeviceCopy:
    """The copies from one device into one slot, under way from the start.

    Args:
        device: The device.
        now: What the trainer's next work there may change: that work comes after these copies.
        later: What only a step changes; see `order`.
        cuda: torch.cuda, or what stands for it.

    Raises:
        RuntimeError: What torch says of a copy that can't be made.
    """

    def __init__(self, device: torch.device, now: Pairs, later: Pairs, *, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        # Alive until the last byte has arrived: freed memory is given to the trainer's next tensors.
        self._kept = [source for _, source in (*now, *later)]
        self._end = cuda.Event(
            blocking=True
        )  # the thread that waits for it must not spin on a CPU of the trainer's
        side, current = _side_stream(device, cuda), cuda.current_stream(device)
        side.wait_stream(current)
        with cuda.stream(side), torch.no_grad():
            _copy(now)
            before = side.record_event()
            _copy(later)
            side.record_event(self._end)
        if now:
            current.wait_event(before)

    def __repr__(self) -> str:
        return f"<DeviceCopy from {self._device}, {len(self._kept)} tensors>"

    def order(self) -> None:
        """Let what the calling thread's stream does next to the tensors come after the copies; the host doesn't wait."""
        self._cuda.current_stream(self._device).wait_event(self._end)

    def wait(self) -> None:
        """Return when every byte has arrived."""
        self._end.synchronize()
        self._kept.clear()


def _copy(pairs: Pairs) -> None:
    for place, source in pairs:
        place.copy_(source, non_blocking=True)


def _side_stream(device: torch.device, cuda: Any) -> Any:
    """One for each device and process: streams are few, and clients copy one after the other."""
    make: Callable[..., Any] = cuda.Stream
    if cuda is not torch.cuda:
        return make(device=device)
    with _lock:
        if device not in _streams:
            _streams[device] = make(device=device)
        return _streams[device]
