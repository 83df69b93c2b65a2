"""The first bytes of the large shards are read and hashed before anybody asks for them, and nothing else changes by it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk import checkpoint_reader, cold_read, head_start, read_ahead, read_buffers
from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.reader import Span
from ckptd.errors import CorruptCheckpoint, ReadFailed, StateMismatch

PIECE = 4096
HEAD = 3 * PIECE
PATIENCE_S = 60.0
VALUES = 6000  # of one tensor, which lies in a shard of its own


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (read_buffers, read_ahead, cold_read):
        monkeypatch.setattr(module, "BUFFER_BYTES", PIECE)
    for module in (head_start, checkpoint_reader):
        monkeypatch.setattr(module, "HEAD_BYTES", HEAD)
    monkeypatch.setattr(checkpoint_reader, "_most_heads", lambda: 2)
    monkeypatch.setattr(read_buffers, "_free", [])


@pytest.fixture(params=[True, False], ids=["cold", "warm"])
def cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in (head_start, checkpoint_reader):
        monkeypatch.setattr(module, "is_cold", lambda _fd, size: bool(request.param) and size > PIECE)
    return bool(request.param)


def state(shift: float = 0.0) -> dict[str, Any]:
    return {"model": {f"t{number}": torch.arange(VALUES) + number + shift for number in range(3)}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckptd.save(tmp_path / "saved", state(), step=1, sharding=ckptd.Sharding(shards=3))
    return tmp_path / "saved"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, bool]]:
    """(file, offset, bytes, with O_DIRECT) of every read of a shard."""
    read, seen = os.preadv, []

    def preadv(fd: int, buffers: Any, at: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        count = read(fd, buffers, at)
        if ".shard-" in name:
            seen.append((name, at, count, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


class Held(threading.Event):
    """No head is read before this is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    go, read = Held(), head_start.read_fully

    def read_fully(*args: Any) -> int:
        go.begun.release()
        assert go.wait(PATIENCE_S)
        return read(*args)

    monkeypatch.setattr(head_start, "read_fully", read_fully)
    yield go
    go.set()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckptd-read"]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.shard-*.pt"))


def spans_by(seed: int, size: int) -> list[Span]:
    """Ascending ones, some empty, some side by side, some across the end of the head."""
    draw, spans, at = random.Random(seed), [], 0
    while at < size:
        at += draw.choice([0, 0, 1, 100, PIECE])
        length = min(draw.choice([0, 1, 64, 1000, PIECE, PIECE + 1, HEAD, HEAD + 1]), size - at)
        if length < 0:
            break
        spans.append(Span(at, memoryview(bytearray(length))))
        at += length
    return spans


@pytest.mark.parametrize("seed", range(10))
def test_every_span_gets_its_bytes_wherever_the_head_ends(saved: Path, cold: bool, seed: int) -> None:
    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        for shard in shards(saved):
            whole = shard.read_bytes()
            spans = spans_by(seed, len(whole))
            reader.read_into(shard.name, spans)
            for span in spans:
                assert bytes(span.into) == whole[span.offset : span.offset + len(span.into)]
    assert not readers()


def test_each_span_is_begun_once_and_done_once_in_their_order(saved: Path, cold: bool) -> None:
    shard, said = shards(saved)[-1], []

    def span(number: int) -> Span:
        begin = lambda: said.append(("begin", number))  # noqa: E731
        done = lambda: said.append(("done", number))  # noqa: E731
        return Span(number * 2 * PIECE, memoryview(bytearray(2 * PIECE)), begin, done)

    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        reader.read_into(shard.name, [span(number) for number in range(3)])
    assert said == [(word, number) for number in range(3) for word in ("begin", "done")]


def test_each_byte_is_read_once_and_the_head_as_the_rest_is(
    saved: Path, cold: bool, reads: list[tuple[str, int, int, bool]]
) -> None:
    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        for shard in shards(saved):
            reader.read_into(shard.name, [])
    for shard in shards(saved):
        own = sorted(read[1:3] for read in reads if read[0] == shard.name)
        ends = [at + count for at, count in own]
        assert [at for at, _ in own] == [0, *ends[:-1]] and ends[-1] == shard.stat().st_size
    assert not cold or len({is_direct for *_, is_direct in reads}) == 1  # a file system has it or not


def test_no_more_is_read_ahead_than_two_heads(
    saved: Path, cold: bool, reads: list[tuple[str, int, int, bool]]
) -> None:
    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        for head in reader._heads.values():
            head.wait()
    assert [(at, count) for _, at, count, _ in reads] == [(0, HEAD)] * 2
    assert {name for name, *_ in reads} < {shard.name for shard in shards(saved)}


def test_one_file_and_very_many_have_no_head_start(
    saved: Path, tmp_path: Path, reads: list[tuple[str, int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptd.save(tmp_path / "single", state(), step=1)
    monkeypatch.setattr(checkpoint_reader, "_OPEN_AT_ONCE", 2)
    for folder in (saved, tmp_path / "single"):
        with CheckpointReader(str(folder)) as reader:
            reader.begin()
    assert not reads


@pytest.mark.parametrize("at", [HEAD // 2, 2 * HEAD - 1])
def test_a_flipped_bit_in_the_head_or_behind_it_is_refused(saved: Path, cold: bool, at: int) -> None:
    for shard in shards(saved):
        data = bytearray(shard.read_bytes())
        data[at] ^= 1
        shard.write_bytes(data)
    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        for shard in shards(saved):
            with pytest.raises(CorruptCheckpoint, match="sha256"):
                reader.read_into(shard.name, [])


def test_a_head_that_cannot_be_read_is_said_where_its_file_is_wanted(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_fully(*_: Any) -> int:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(head_start, "read_fully", read_fully)
    live = state(shift=7.0)
    before = {name: value.clone() for name, value in live["model"].items()}
    with (
        ckptd.Client(saved.parent / "root", daemon="off") as client,
        pytest.raises(ReadFailed, match="bad sector"),
    ):
        client.restore(live, source=saved, verify_first=True)
    assert all(torch.equal(live["model"][name], value) for name, value in before.items())
    assert not readers()


def test_a_file_that_ends_in_its_head_is_refused(saved: Path, held: threading.Event) -> None:
    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        for shard in shards(saved):
            os.truncate(shard, PIECE)
        held.set()
        for shard in shards(saved):
            with pytest.raises(CorruptCheckpoint, match="size differs"):
                reader.read_into(shard.name, [])


def test_where_the_first_direct_read_is_refused_all_is_read_through_the_cache(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (head_start, checkpoint_reader):
        monkeypatch.setattr(module, "is_cold", lambda _fd, size: size > PIECE)
    read = os.preadv

    def preadv(fd: int, buffers: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    loaded = ckptd.load(saved)["model"]
    assert all(torch.equal(loaded[name], value) for name, value in state()["model"].items())


def test_without_memory_for_a_head_its_file_is_read_as_the_others_are(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_buffer(_size: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(head_start, "new_buffer", new_buffer)
    loaded = ckptd.load(saved)["model"]
    assert all(torch.equal(loaded[name], value) for name, value in state()["model"].items())


def test_a_look_into_a_file_waits_until_its_head_is_read(saved: Path, held: threading.Event) -> None:
    shard = shards(saved)[-1]
    with CheckpointReader(str(saved)) as reader:
        reader.begin()
        waited = threading.Timer(0.05, held.set)
        waited.start()
        into = memoryview(bytearray(100))
        reader.peek_into(shard.name, [Span(1, into)])
        assert held.is_set()
        waited.join()
    assert bytes(into) == shard.read_bytes()[1:101]


def test_a_reader_is_closed_once_nobody_reads_its_files(saved: Path, held: Held) -> None:
    reader = CheckpointReader(str(saved))
    reader.begin()
    assert all(held.begun.acquire(timeout=PATIENCE_S) for _ in range(2))
    fds = list(reader._fds.values())
    closing = threading.Thread(target=reader.close)
    closing.start()
    closing.join(0.1)
    assert len(readers()) == 2 and all(fcntl.fcntl(fd, fcntl.F_GETFD) >= 0 for fd in fds)
    held.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and not readers()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            fcntl.fcntl(fd, fcntl.F_GETFD)


def test_a_head_whose_start_was_interrupted_ends_before_its_file_is_closed(
    saved: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, reader = threading.Thread.start, CheckpointReader(str(saved))

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        assert held.begun.acquire(timeout=PATIENCE_S)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.begin()
    let_go = threading.Timer(0.05, held.set)
    let_go.start()
    reader.close()
    assert held.is_set() and not readers()
    let_go.join()


@pytest.mark.parametrize("ended_by", [StateMismatch, KeyboardInterrupt])
def test_a_restore_that_is_refused_or_interrupted_leaves_no_thread_no_file_and_the_state_as_it_was(
    saved: Path, ended_by: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = state(shift=7.0)
    before = {name: value.clone() for name, value in live["model"].items()}
    if ended_by is StateMismatch:
        live["model"]["new"] = torch.zeros(3)
    else:

        def table(*_: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr("ckptd.tensors.reading.table_from_bytes", table)
    with ckptd.Client(saved.parent / "root", daemon="off") as client:
        open_before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ended_by):
            client.restore(live, source=saved)
        assert len(os.listdir("/proc/self/fd")) == open_before
    assert not readers()
    assert all(torch.equal(live["model"][name], value) for name, value in before.items())
