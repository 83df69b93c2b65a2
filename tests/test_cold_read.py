"""A file that isn't in the page cache: read round it, with the same bytes in the same places as through it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk import checkpoint_reader, cold_read, read_ahead, read_buffers
from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.cold_read import is_cold, pieces_into
from ckptd.disk.read_ahead import direct
from ckptd.disk.reader import Span
from ckptd.errors import CorruptCheckpoint

PIECE = 4096
SIZE = 9 * PIECE + 17


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (read_buffers, read_ahead, cold_read):
        monkeypatch.setattr(module, "BUFFER_BYTES", PIECE)
    monkeypatch.setattr(read_buffers, "_free", [])
    for name in cold_read._RANKS_HERE:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "f").write_bytes(os.urandom(SIZE))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd
    os.close(fd)


def spans_by(seed: int) -> list[Span]:
    """Ascending ones, some empty, some side by side, some over many pieces."""
    draw, spans, at = random.Random(seed), [], 0
    while at < SIZE:
        at += draw.choice([0, 0, 1, 100, PIECE])
        length = min(draw.choice([0, 1, 64, 1000, PIECE, PIECE + 1, 3 * PIECE]), SIZE - at)
        if length < 0:
            break
        spans.append(Span(at, memoryview(bytearray(length))))
        at += length
    return spans


@pytest.mark.parametrize("seed", range(20))
def test_every_span_gets_its_bytes_and_all_are_seen_in_order(file: int, seed: int) -> None:
    spans = spans_by(seed)
    seen = b"".join(bytes(piece) for piece in pieces_into(file, spans, SIZE))
    whole = os.pread(file, SIZE, 0)
    assert seen == whole
    for span in spans:
        assert bytes(span.into) == whole[span.offset : span.offset + len(span.into)]


def test_spans_may_share_memory_since_one_is_done_before_the_next_begins(file: int) -> None:
    block, said, got = bytearray(2 * PIECE), [], []

    def span(number: int) -> Span:
        def done() -> None:
            said.append(("done", number))
            got.append(bytes(block))

        begin = lambda: said.append(("begin", number))  # noqa: E731
        return Span(100 + number * len(block), memoryview(block), begin, done)

    for _ in pieces_into(file, [span(number) for number in range(3)], SIZE):
        pass
    assert said == [(word, number) for number in range(3) for word in ("begin", "done")]
    assert b"".join(got) == os.pread(file, 6 * PIECE, 100)


def in_memory(pages: int) -> Any:
    """What mincore says where only the first pages of a file are there."""
    first: list[int] = []

    def residency(address: int, _count: int, page: int) -> bytes:
        first.append(address)
        return bytes([(address - first[0]) // page < pages])

    return residency


@pytest.mark.parametrize(("pages", "cold"), [(0, True), (4, True), (6, False), (10, False)])
def test_a_file_is_cold_while_less_than_half_of_it_is_in_memory(
    file: int, pages: int, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_read, "residency", in_memory(pages))
    assert is_cold(file, SIZE) is cold


def test_few_pages_of_a_large_file_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "large").open("wb+") as large:
        large.truncate(100_000 * mmap.PAGESIZE)
        looked: list[int] = []
        monkeypatch.setattr(cold_read, "residency", lambda address, *_: looked.append(address) or b"\0")
        assert is_cold(large.fileno(), 100_000 * mmap.PAGESIZE)
    assert 32 <= len(looked) <= 64
    assert looked[-1] - looked[0] > 90_000 * mmap.PAGESIZE


def test_what_cannot_be_told_or_is_small_is_read_through_the_cache(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_read, "residency", lambda *_: None)
    assert not is_cold(file, SIZE)
    monkeypatch.setattr(cold_read, "residency", lambda *_: b"\0")
    assert is_cold(file, SIZE) and not is_cold(file, PIECE)


@pytest.mark.parametrize("name", cold_read._RANKS_HERE)
def test_where_other_ranks_of_the_node_read_it_too_it_comes_into_the_cache(
    file: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_read, "residency", lambda *_: b"\0")
    monkeypatch.setenv(name, "1")
    assert is_cold(file, SIZE)
    monkeypatch.setenv(name, "8")
    assert not is_cold(file, SIZE)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CheckpointReader, str]:
    """Open, of which every file is cold, and the name of a file of several pieces."""
    monkeypatch.setattr(checkpoint_reader, "is_cold", lambda _fd, _size: True)
    ckptd.save(tmp_path / "saved", {"weights": torch.rand(20_000)}, step=1)
    return CheckpointReader(str(tmp_path / "saved")), "ckpt.pt"


def test_a_cold_file_is_read_with_o_direct(
    checkpoint: tuple[CheckpointReader, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, name = checkpoint
    asked, read = [], os.preadv

    def preadv(fd: int, *args: Any) -> int:
        asked.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return read(fd, *args)

    with (Path(reader.path) / name).open("rb") as same, direct(same.fileno()) as is_direct:
        monkeypatch.setattr(os, "preadv", preadv)
    with reader:
        assert reader.read(name) == (Path(reader.path) / name).read_bytes()
    size = (Path(reader.path) / name).stat().st_size
    assert asked == [is_direct] * -(-size // PIECE)


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    checkpoint: tuple[CheckpointReader, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, name = checkpoint
    read, refused = os.preadv, []

    def preadv(*args: Any) -> int:
        if not refused:
            refused.append(args)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    with reader:
        assert reader.read(name) == (Path(reader.path) / name).read_bytes()
    assert refused


def test_a_flipped_bit_of_a_cold_file_is_refused(checkpoint: tuple[CheckpointReader, str]) -> None:
    reader, name = checkpoint
    path = Path(reader.path) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with reader, pytest.raises(CorruptCheckpoint, match="sha256"):
        reader.read(name)


def test_a_cold_file_that_gets_shorter_is_refused(
    checkpoint: tuple[CheckpointReader, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, name = checkpoint
    read = os.preadv

    def preadv(*args: Any) -> int:
        os.truncate(Path(reader.path) / name, 2 * PIECE)
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    with reader, pytest.raises(CorruptCheckpoint, match="size differs"):
        reader.read(name)
