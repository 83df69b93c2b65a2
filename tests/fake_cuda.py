"""Stands for torch.cuda: streams run nothing by themselves, and every order and wait is noted.

Copies made on a stream are real, and made when the stream runs: at the wait of the host, or when a test says so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class FakeCuda:
    """One device. `log` has what happened, in order."""

    def __init__(self) -> None:
        self.may_wait = threading.Event()  #: until it is set, no wait of the host ends
        self.may_wait.set()
        self.log: list[str] = []
        self.trainers = FakeStream(self, "trainer")
        self.current = self.trainers

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "side")

    def Event(self, *, blocking: bool) -> FakeEvent:
        assert blocking
        return FakeEvent()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    """Work in its order, each done once."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self.work: list[Callable[[], Any]] = []
        self._done = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")
        self.work.append(other.record_event().run)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for an event of {event.stream.name}")
        self.work.append(event.run)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.stream, event.at = self, len(self.work)
        return event

    def run(self, until: int | None = None) -> None:
        while self._done < (len(self.work) if until is None else until):
            self._done += 1
            self.work[self._done - 1]()
            self.work[self._done - 1] = list  # what it held is let go


class FakeEvent:
    """Comes once all that was on the stream before it is done."""

    stream: FakeStream
    at: int

    def run(self) -> None:
        self.stream.run(self.at)

    def synchronize(self) -> None:
        self.stream.cuda.log.append(f"the host waits for {self.stream.name}")
        assert self.stream.cuda.may_wait.wait(60)
        self.run()


class DeviceTensor:
    """A place or a source whose copy is put on the current stream."""

    def __init__(self, cuda: FakeCuda, tensor: torch.Tensor) -> None:
        self.cuda, self.tensor = cuda, tensor

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.log.append(f"copy on {self.cuda.current.name}")
        self.cuda.current.work.append(lambda: self.tensor.copy_(source.tensor))
