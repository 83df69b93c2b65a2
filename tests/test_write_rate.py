from __future__ import annotations

import threading
from typing import Any

import pytest

from ckptd.disk.write_rate import SLOWEST_BYTES_PER_S, WriteRate, check_rate
from ckptd.errors import InvalidArgument
from ckptd.limits import MIB, PAGE_ALIGNMENT


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def rated(bytes_per_s: int | None) -> tuple[WriteRate, Clock]:
    clock = Clock()
    return WriteRate(bytes_per_s, now=clock, sleep=clock.sleep), clock


def test_without_a_bound_nobody_waits() -> None:
    rate, clock = rated(None)
    rate.take(10**15)
    assert clock.now == 1000.0


@pytest.mark.parametrize("block", [4096, 100_000, 7 * MIB])
def test_over_any_time_no_more_is_written_than_the_bound_allows(block: int) -> None:
    rate, clock = rated(50_000_000)
    for _ in range(40):
        rate.take(block)
    assert (clock.now - 1000.0) * 50_000_000 >= 40 * block - 0.1 * 50_000_000 - 1
    assert (clock.now - 1000.0) * 50_000_000 <= 40 * block


def test_a_pause_is_not_made_up_for() -> None:
    rate, clock = rated(1_000_000)
    rate.take(1_000_000)
    clock.now += 3600
    began = clock.now
    rate.take(1_000_000)
    assert clock.now - began == pytest.approx(0.9)


def test_threads_share_one_bound() -> None:
    waits: list[float] = []
    rate = WriteRate(10_000_000, now=lambda: 1000.0, sleep=waits.append)
    threads = [threading.Thread(target=rate.take, args=(1_000_000,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(round(wait, 6) for wait in waits) == [round(0.1 * n, 6) for n in range(1, 10)]


@pytest.mark.parametrize(
    ("bytes_per_s", "block"),
    [(None, 8 * MIB), (10**12, 8 * MIB), (SLOWEST_BYTES_PER_S, 24 * PAGE_ALIGNMENT), (20_000_000, 1_998_848)],
)
def test_blocks_are_whole_pages_and_short_enough_to_keep_the_bound_smooth(
    bytes_per_s: int | None, block: int
) -> None:
    assert WriteRate(bytes_per_s).block_bytes == block
    assert block % PAGE_ALIGNMENT == 0


@pytest.mark.parametrize("value", [None, 0])
def test_none_and_zero_are_no_bound(value: int | None) -> None:
    assert check_rate(value, "here") is None


@pytest.mark.parametrize("value", [1, SLOWEST_BYTES_PER_S - 1, -5, 2**63, True, False, 5e6, "5MB", []])
def test_what_would_never_end_and_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_write_rate"):
        check_rate(value, "max_write_rate")
