"""Moves of many bytes in blocks: every byte, nothing beside them, and few calls that need the interpreter's lock."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from ckptd.tensors import block_moves
from ckptd.tensors.block_moves import move_bytes

_BLOCK = 480 * 1024


@pytest.mark.parametrize("shift", [(0, 0), (3, 7), (64, 1)])
@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        _BLOCK,
        2 * _BLOCK + 63,
        2 * _BLOCK + 64,
        2 * _BLOCK + 65,
        3 * _BLOCK + 64,
        7 * _BLOCK - 1,
        4 << 20,
    ],
)
def test_exactly_these_bytes_are_moved_wherever_they_lie(nbytes: int, shift: tuple[int, int]) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 200, dtype=np.uint8)
    target = np.full(nbytes + 200, 165, np.uint8)
    to, start = shift
    move_bytes(target.ctypes.data + to, source.ctypes.data + start, nbytes)
    assert np.array_equal(target[to : to + nbytes], source[start : start + nbytes])
    assert (target[:to] == 165).all() and (target[to + nbytes :] == 165).all()


def test_however_large_a_move_the_interpreters_lock_is_needed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def memmove(to: int, source: int, nbytes: int) -> None:
        calls.append(nbytes)
        ctypes.memmove(to, source, nbytes)

    monkeypatch.setattr(block_moves, "ctypes", type("counted", (), {"memmove": staticmethod(memmove)}))
    source, target = np.ones(40 << 20, np.uint8), np.zeros(40 << 20, np.uint8)
    move_bytes(target.ctypes.data, source.ctypes.data, 40 << 20)
    assert len(calls) == 1 and calls[0] <= _BLOCK and bool(target.all())
