from __future__ import annotations

import math
from typing import Any

import pytest

from ckptd.errors import InvalidArgument
from ckptd_daemon.verify.rota import DEFAULT_EVERY_S, Rota, Standing, age_s, check_every

WEEK = float(DEFAULT_EVERY_S)
KEYS = [("r", f"step-{step:09d}") for step in range(1000)]
TEN_YEARS = 10 * 366 * 86_400


def due_times(rota: Rota, until: float, step: float) -> list[float]:
    """When each comes due, if each is read as soon as it is."""
    now, times = 0.0, []
    while now < until:
        while (key := rota.next(now)) is not None:
            times.append(now)
            rota.read(key, now)
        now += step
    return times


def test_what_was_read_in_one_burst_is_read_again_spread_over_half_of_the_period_and_never_after_it() -> None:
    rota = Rota(WEEK)
    for key in KEYS:
        rota.read(key, 0.0)
    assert rota.next(WEEK / 2 - 1) is None
    days = [0] * 8
    for at in due_times(rota, WEEK + 1, 600.0):
        days[int(at // 86_400)] += 1
    assert sum(days) >= len(KEYS)
    assert max(days[4:]) < len(KEYS) / 2  # 3.5 days, 286 a day
    assert rota.standing(WEEK).late == 0


def test_a_restart_goes_on_where_the_last_one_stopped() -> None:
    before, after = Rota(WEEK), Rota(WEEK)
    for number, key in enumerate(KEYS):
        before.read(key, number * 600.0)
    for number, key in enumerate(KEYS):
        after.read(key, 5.0, age_s=WEEK - number * 600.0)
    assert after.next(5.0) == before.next(WEEK)
    assert after.due_in(5.0) == before.due_in(WEEK) == 0
    assert after.standing(5.0) == before.standing(WEEK)


def test_the_one_that_has_been_due_for_longest_is_next() -> None:
    rota = Rota(100.0)
    for name, age in (("a", 300.0), ("b", 500.0), ("c", 10.0)):
        rota.read(("r", name), 0.0, age_s=age)
    assert [rota.next(0.0)] == [("r", "b")]
    rota.read(("r", "b"), 0.0)
    assert rota.next(0.0) == ("r", "a")
    rota.put_off(("r", "a"), 40.0)
    assert rota.next(0.0) is None and rota.due_in(0.0) == 40.0
    assert rota.next(40.0) == ("r", "a")


def test_what_is_gone_is_forgotten_and_not_put_off_into_being() -> None:
    rota = Rota(100.0)
    for key in (("r", "a"), ("r", "b"), ("other", "a")):
        rota.read(key, 0.0, age_s=None)
    rota.listed("r", {"b"})
    rota.put_off(("r", "a"), 1.0)
    rota.forget(("other", "a"))
    rota.forget(("r", "never there"))
    assert rota.next(99.0) == ("r", "b") and rota.standing(0.0).checkpoints == 1
    rota.forget(("r", "b"))
    assert rota.next(1e9) is rota.due_in(0.0) is None


@pytest.mark.parametrize("jump", [-TEN_YEARS, -1.0, -math.inf])
def test_a_time_that_cannot_be_is_unknown_and_due_at_once_not_in_ten_years(jump: float) -> None:
    now = 1.8e9
    assert age_s(now, now + jump) is None
    rota = Rota(WEEK)
    rota.read(("r", "a"), 0.0, age_s=None)
    assert rota.next(0.0) == ("r", "a")
    assert rota.standing(0.0) == Standing(checkpoints=1, due=1, late=1, oldest_s=None, next_s=0.0)


def test_a_clock_that_jumps_ahead_costs_a_read_and_no_more() -> None:
    now = 1.8e9
    assert age_s(now, now + TEN_YEARS) == TEN_YEARS
    assert age_s(now - 5, now) == 5
    assert age_s(0.0, now) is age_s(-1.0, now) is age_s(math.nan, now) is age_s(math.inf, now) is None
    rota = Rota(WEEK)
    rota.read(("r", "a"), 0.0, age_s=age_s(now, now + TEN_YEARS))
    assert rota.next(0.0) == ("r", "a")
    rota.read(("r", "a"), 0.0)
    assert rota.next(WEEK / 2 - 1) is None


def test_the_standing_says_since_when_all_was_read_and_what_is_late() -> None:
    rota = Rota(100.0)
    assert rota.standing(0.0) == Standing(checkpoints=0, due=0, late=0, oldest_s=None, next_s=None)
    rota.read(("r", "a"), 0.0, age_s=101.0)
    rota.read(("r", "b"), 0.0)
    assert rota.standing(0.0) == Standing(checkpoints=2, due=1, late=1, oldest_s=101.0, next_s=0.0)


def test_a_period_is_an_hour_or_more_or_none_at_all() -> None:
    assert check_every(None, "x") == DEFAULT_EVERY_S
    assert [check_every(value, "x") for value in (0, 3600, 86_400)] == [0, 3600, 86_400]


@pytest.mark.parametrize("value", [1, 3599, -1, 10**10, 3600.0, 0.5, True, "7d", math.inf, math.nan, [1]])
def test_what_is_no_period_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"every_s.*or 0 for never"):
        check_every(value, "every_s")
