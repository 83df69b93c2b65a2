"""A file read piece by piece, by a thread of its own that is one piece ahead."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import read_ahead, read_buffers
from ckptd.disk.read_ahead import NotDirect, direct, pieces_ahead

PIECE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_buffers, "BUFFER_BYTES", PIECE)
    monkeypatch.setattr(read_ahead, "BUFFER_BYTES", PIECE)
    monkeypatch.setattr(read_buffers, "_free", [])


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "f").write_bytes(os.urandom(9 * PIECE + 17))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd
    os.close(fd)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckptd-read"]


def failing_at(number: int, error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read of that number, from 0, fails."""
    read, calls = os.preadv, iter(range(1000))

    def preadv(*args: Any) -> int:
        if next(calls) == number:
            raise error
        return read(*args)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE, 5 * PIECE, 9 * PIECE + 17])
def test_the_pieces_are_the_file(file: int, size: int) -> None:
    pieces = [bytes(piece) for piece in pieces_ahead(file, size)]
    assert b"".join(pieces) == os.pread(file, size, 0)
    assert all(len(piece) == PIECE for piece in pieces[:-1])
    assert not readers()


def test_a_short_read_is_continued(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:1000]], at))
    assert b"".join(map(bytes, pieces_ahead(file, 3 * PIECE))) == os.pread(file, 3 * PIECE, 0)


def test_an_error_is_raised_where_its_piece_is_wanted(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(3, OSError(errno.EIO, "bad sector"), monkeypatch)
    seen = []
    with pytest.raises(OSError, match="bad sector"):
        seen.extend(bytes(piece) for piece in pieces_ahead(file, 9 * PIECE))
    assert b"".join(seen) == os.pread(file, 3 * PIECE, 0)
    assert not readers() and len(read_buffers._free) == 1


def test_a_file_that_ends_before_is_no_shorter_one(file: int) -> None:
    with pytest.raises(EOFError):
        list(pieces_ahead(file, 20 * PIECE))
    assert not readers()


@pytest.mark.parametrize(("refused", "kind"), [(0, NotDirect), (1, OSError)])
def test_only_the_first_read_may_be_refused_by_the_file_system(
    file: int, refused: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(refused, OSError(errno.EINVAL, "Invalid argument"), monkeypatch)
    with pytest.raises(kind):
        list(pieces_ahead(file, 9 * PIECE))


def test_when_it_is_given_up_nobody_reads_into_the_buffers_any_more(file: int) -> None:
    pieces = pieces_ahead(file, 9 * PIECE)
    next(pieces)
    assert len(readers()) == 1
    pieces.close()
    assert not readers() and len(read_buffers._free) == 1


def test_a_file_is_read_round_the_cache_meanwhile_only(file: int) -> None:
    with direct(file) as is_direct:
        assert bool(os.O_DIRECT & flags(file)) is is_direct
    assert not os.O_DIRECT & flags(file)


def flags(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_where_no_thread_can_be_had_who_wants_a_piece_reads_it(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch)
    assert b"".join(map(bytes, pieces_ahead(file, 9 * PIECE + 17))) == os.pread(file, 9 * PIECE + 17, 0)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_one_whose_start_was_interrupted_reads_into_no_buffer_that_was_given_back(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(pieces_ahead(file, 9 * PIECE))
    assert not readers() and len(read_buffers._free) == 1
