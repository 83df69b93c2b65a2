"""Buffers that files are read through: aligned, one reader's alone, and as few as are used at once."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from ckptd.disk import read_buffers
from ckptd.disk.read_buffers import BUFFER_BYTES, buffer_pair


@pytest.fixture(autouse=True)
def none_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_buffers, "_free", [])


def address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_a_pair_is_one_huge_page_and_used_again() -> None:
    with buffer_pair() as (first, second):
        start = address(first)
        assert start % (2 * BUFFER_BYTES) == 0
        assert (address(second), len(first), len(second)) == (
            start + BUFFER_BYTES,
            BUFFER_BYTES,
            BUFFER_BYTES,
        )
    with buffer_pair() as (again, _):
        assert address(again) == start


@pytest.mark.parametrize(("cpus", "kept"), [(2, 2), (64, 4)])
def test_each_reader_has_its_own_and_few_are_kept(
    cpus: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
    readers = kept + 2
    together = Barrier(readers)

    def read(_number: int) -> int:
        with buffer_pair() as (first, _):
            together.wait(30)
            return address(first)

    with ThreadPoolExecutor(readers) as pool:
        assert len(set(pool.map(read, range(readers)))) == readers
    assert len(read_buffers._free) == kept


def test_a_reader_that_fails_gives_its_pair_back() -> None:
    with pytest.raises(ZeroDivisionError), buffer_pair():
        raise ZeroDivisionError
    assert len(read_buffers._free) == 1
