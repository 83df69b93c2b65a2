"""Bytes on their way to a device: two blocks in turn, none filled before its last copy is done. A fake device tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.disk.reader import Span
from ckptd.tensors.through_host import ThroughHost


class FakeEvent:
    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def synchronize(self) -> None:
        self._log.append(f"waited for {self._number}")


class FakeCuda:
    """Copies happen at once; each event has a number."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._count = 0

    def is_available(self) -> bool:
        return False

    def current_stream(self, device: torch.device) -> FakeCuda:
        return self

    def record_event(self) -> FakeEvent:
        self._count += 1
        self.log.append(f"copied {self._count}")
        return FakeEvent(self.log, self._count)


def read(content: bytes, spans: list[Span], log: list[str]) -> None:
    """What a reader does."""
    for span in spans:
        if span.begin is not None:
            span.begin()
        log.append(f"read {span.into.nbytes}")
        span.into[:] = content[span.offset : span.offset + span.into.nbytes]
        if span.done is not None:
            span.done()


@pytest.mark.parametrize("sizes", [[10], [64], [65, 1], [200, 3, 130]])
def test_every_byte_arrives_whatever_the_sizes(sizes: list[int], tmp_path: Path) -> None:
    content = bytes(range(256)) * 2
    live = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    cuda, offset, spans = FakeCuda(), 7, list[Span]()
    host = ThroughHost(torch.device("cpu"), cuda=cuda, block_bytes=64)
    for one in live:
        spans += host.spans(offset, one)
        offset += one.numel()
    read(content, spans, cuda.log)
    host.finish()
    assert b"".join(bytes(one.numpy()) for one in live) == content[7:offset]


def test_a_block_is_filled_again_only_when_its_copy_is_done_and_all_are_waited_for() -> None:
    cuda: Any = FakeCuda()
    host = ThroughHost(torch.device("cpu"), cuda=cuda, block_bytes=64)
    read(bytes(300), list(host.spans(0, torch.zeros(200, dtype=torch.uint8))), cuda.log)
    host.finish()
    assert cuda.log == [
        "read 64", "copied 1", "read 64", "copied 2", "waited for 1", "read 64", "copied 3",
        "waited for 2", "read 8", "copied 4", "waited for 3", "waited for 4",
    ]  # fmt: skip


def test_a_tensor_that_isnt_in_c_order_gets_its_bytes_as_they_lie() -> None:
    live = torch.zeros(6, 4).t()
    wanted = torch.randn(6, 4)
    content = wanted.numpy().tobytes()
    cuda = FakeCuda()
    host = ThroughHost(torch.device("cpu"), cuda=cuda, block_bytes=40)
    read(content, list(host.spans(0, live)), cuda.log)
    assert torch.equal(live, wanted.t())
