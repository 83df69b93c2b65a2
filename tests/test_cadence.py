from __future__ import annotations

import math

import pytest

from ckptd import Cadence
from ckptd.errors import InvalidArgument


def saves(cadence: Cadence, steps: range, *, last_step: int | None, step_s: float = 0.0) -> list[int]:
    """The steps at which a loop that asks after each of `steps` saves."""
    found, since = [], 0.0
    for step in steps:
        since += step_s
        if cadence.due(step, last_step=last_step, since_s=since):
            found.append(step)
            last_step, since = step, 0.0
    return found


def test_a_fresh_run_saves_after_its_first_step_and_then_at_the_multiples() -> None:
    assert saves(Cadence(every_steps=5), range(1, 13), last_step=None) == [1, 5, 10]


def test_a_resumed_run_saves_at_the_same_absolute_multiples() -> None:
    assert saves(Cadence(every_steps=5), range(8, 21), last_step=7) == [10, 15, 20]


def test_a_run_resumed_from_a_multiple_does_not_save_its_next_step() -> None:
    assert saves(Cadence(every_steps=5), range(11, 16), last_step=10) == [15]


def test_without_first_only_the_multiples_are_saved() -> None:
    assert saves(Cadence(every_steps=5, first=False), range(1, 11), last_step=None) == [5, 10]


def test_a_loop_that_asks_every_third_step_saves_after_each_multiple_it_passed() -> None:
    assert saves(Cadence(every_steps=5), range(3, 31, 3), last_step=0) == [6, 12, 15, 21, 27, 30]


def test_seconds_count_from_the_last_snapshot_whatever_caused_it() -> None:
    both = Cadence(every_steps=10, every_s=4.0)
    assert saves(both, range(1, 21), last_step=0, step_s=1.0) == [4, 8, 10, 14, 18, 20]


def test_seconds_alone_are_enough() -> None:
    assert saves(Cadence(every_s=3.0, first=False), range(1, 8), last_step=None, step_s=1.0) == [3, 6]


def test_a_loop_that_starts_over_below_the_last_step_saves_only_at_multiples() -> None:
    assert saves(Cadence(every_steps=5), range(1, 6), last_step=700) == [5]


def test_no_step_is_saved_twice() -> None:
    assert not Cadence(every_steps=5, every_s=1.0).due(5, last_step=5, since_s=100.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"every_steps": 0},
        {"every_steps": -5},
        {"every_steps": True},
        {"every_steps": 2.5},
        {"every_s": 0},
        {"every_s": math.nan},
        {"every_s": math.inf},
        {"every_s": "10m"},
    ],
)
def test_a_cadence_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Cadence(**wrong)  # type: ignore[arg-type]
