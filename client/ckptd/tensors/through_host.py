# ruff: noqa: TID253
"""Bytes of a file on their way to a device: through two blocks of pinned host memory, one read while the other is copied."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from ckptd.disk.reader import Span
from ckptd.limits import MIB
from ckptd.tensors.flat import flat

_BLOCK_BYTES: Final = 8 * MIB


class ThroughHost:
    """The blocks that one file is read through.

    Args:
        device: Where its tensors are.
        cuda: torch.cuda, or what stands for it.
        block_bytes: Of each of the two blocks.
    """

    def __init__(
        self, device: torch.device, *, cuda: Any = torch.cuda, block_bytes: int = _BLOCK_BYTES
    ) -> None:
        self._device, self._cuda = device, cuda
        self._blocks = [
            torch.empty(block_bytes, dtype=torch.uint8, device="cpu", pin_memory=cuda.is_available())
            for _ in range(2)
        ]
        self._copied: list[Any] = [None, None]  # the event behind the last copy out of each
        self._turn = 0

    def spans(self, offset: int, live: torch.Tensor) -> Iterator[Span]:
        """Spans that fill live, a dense tensor on the device, with the bytes of the file from offset on.

        They must be read one after the other, as they come, and `finish` be called behind the last.
        """
        whole = flat(live)
        for start in range(0, whole.numel(), self._blocks[0].numel()):
            part = whole[start : start + self._blocks[0].numel()]
            turn, self._turn = self._turn, 1 - self._turn
            block = self._blocks[turn][: part.numel()]
            yield Span(
                offset + start,
                memoryview(block.numpy().data),
                begin=partial(self._wait, turn),
                done=partial(self._copy, turn, block, part),
            )

    def finish(self) -> None:
        """Wait for the copies that are still under way."""
        for turn in range(2):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        event, self._copied[turn] = self._copied[turn], None
        if event is not None:
            event.synchronize()

    def _copy(self, turn: int, block: torch.Tensor, part: torch.Tensor) -> None:
        # On the device's own stream of this thread: a host thread may read only what the event says is done.
        part.copy_(block, non_blocking=True)
        self._copied[turn] = self._cuda.current_stream(self._device).record_event()
