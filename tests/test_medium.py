from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from ckptd.disk import read_ahead
from ckptd.disk.medium import hash_file

SIZES = (0, 1, 4095, 4096, 4097, 2**20, 2**20 + 1, 4 * 2**20, 4 * 2**20 + 1, 9 * 2**20 + 17)


@pytest.fixture(params=SIZES)
def file(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[int, bytes]:
    data = os.urandom(request.param)
    (tmp_path / "f").write_bytes(data)
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    os.fsync(fd)
    request.addfinalizer(lambda: os.close(fd))
    return fd, data


@pytest.mark.parametrize("uncached", [True, False])
def test_the_hash_is_that_of_the_whole_file(file: tuple[int, bytes], uncached: bool) -> None:
    fd, data = file
    told: list[int] = []
    sha256, count, how = hash_file(fd, uncached=uncached, progress=told.append)
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert count == len(data) == sum(told)
    assert how in (("direct", "dontneed", "cached") if uncached else ("cached",))
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT


def test_without_direct_reads_the_cache_is_dropped_and_looked_at(
    file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, data = file
    monkeypatch.setattr(read_ahead, "_set_flags", lambda _fd, _flags: False)
    sha256, _, how = hash_file(fd, uncached=True)
    assert sha256 == hashlib.sha256(data).hexdigest()
    assert how in ("dontneed", "cached")  # cached: a file system that keeps its pages, such as tmpfs


def test_pages_that_stay_in_memory_are_not_called_read_from_the_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_set_flags", lambda _fd, _flags: False)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda *_args: None
    )  # as for dirty or mapped pages: nothing happens
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    with (tmp_path / "f").open("rb") as file:
        assert hash_file(file.fileno(), uncached=True)[2] == "cached"


def test_a_file_that_gets_shorter_is_an_error_not_a_hash(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (10 * 2**20))
    with (tmp_path / "f").open("rb") as file, pytest.raises(OSError):
        hash_file(file.fileno(), uncached=False, progress=lambda _count: os.truncate(tmp_path / "f", 100))
