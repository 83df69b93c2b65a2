"""Copies beside the training that tests hold up, and what a snapshot should have held."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.snapshot.descriptor import Descriptor, TensorSpec
from ckptd.tensors import background_copy, copying, overlap
from ckptd.tensors.capture import capture
from ckptd.tensors.state_copy import copy_at_once
from ckptd.tensors.step_gate import gate


class HeldCopies:
    """Stands for copy_tensors in copies beside the training: each waits until it may, or for a moment.

    Attributes:
        may: Set when copies may go on.
        begun: Set when one has begun.
        patience_s: How long copies wait at most, None for ever: a step that waits for them never lets them go.
        stepping: Set when a step begins: copies wait for it first, once watch_steps() was called.
        error: Raised in place of the next copies.
        by: Names of the threads that copied.
    """

    def __init__(self, monkeypatch: Any, patience_s: float | None = None) -> None:
        self.may, self.begun = threading.Event(), threading.Event()
        self.patience_s, self.error = patience_s, None
        self.by: list[str] = []
        self.stepping: threading.Event | None = None
        monkeypatch.setattr(background_copy, "copy_tensors", self._copy)
        monkeypatch.setattr(background_copy, "BATCH_BYTES", 1024)
        monkeypatch.setattr(overlap, "AT_ONCE_BYTES", 0)

    @contextlib.contextmanager
    def watch_steps(self) -> Iterator[None]:
        """Let copies go on when a step has ended: it must not have, before they are done. Enter it before the client."""
        stepping = self.stepping = threading.Event()
        let_step = gate.before_step

        def before_step() -> None:
            stepping.set()
            let_step()

        after = register_optimizer_step_post_hook(lambda *_: self.may.set())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gate, "before_step", before_step)
            yield
        after.remove()

    def again(self) -> None:
        """Hold the next copies."""
        for event in (self.may, self.begun, self.stepping):
            if event is not None:
                event.clear()

    def _copy(self, rows: Sequence[TensorSpec], sources: Sequence[torch.Tensor], *where: Any) -> None:
        self.by.append(threading.current_thread().name)
        self.begun.set()
        if self.stepping is not None:
            assert self.stepping.wait(60)
        if not self.may.wait(self.patience_s):
            self.may.set()  # the rest of this copy goes on too
        if self.error is not None:
            raise self.error
        copying.copy_tensors(rows, sources, *where)


def expected_of(state: Mapping[Any, Any]) -> dict[Any, bytes]:
    """The bytes of every tensor of the state as they are now, by key path."""
    captured = capture(state)
    memory = memoryview(bytearray(max(1, captured.data_bytes)))
    copy_at_once(captured, memory)
    return _by_path(captured.tensors, memory)


def held_in(descriptor: Descriptor, data: bytes) -> dict[Any, bytes]:
    """The bytes of every tensor of a snapshot, by key path."""
    return _by_path(descriptor.tensors, memoryview(data))


def _by_path(rows: Sequence[TensorSpec], memory: memoryview) -> dict[Any, bytes]:
    return {row.path: bytes(memory[row.offset : row.offset + row.nbytes]) for row in rows}
