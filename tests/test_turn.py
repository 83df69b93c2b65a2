"""A share of the time, and none of it while others are at work; by a clock of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckptd_daemon.verify.turn import RESTS, STRETCH_S, GivenUp, Turn


class Clock:
    """Passes while somebody works or waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waited_s = 0.0
        self.meanwhile: list[Callable[[], object]] = []  # one is done in each wait

    def __call__(self) -> float:
        return self.now

    def wait(self, _changed: threading.Condition, s: float) -> None:
        assert s > 0
        self.now += s
        self.waited_s += s
        if self.meanwhile:
            self.meanwhile.pop(0)()


def needed() -> bool:
    return True


@pytest.mark.parametrize("piece_s", [0.001, 0.03, 0.1, 5.0])
def test_it_reads_an_eighth_of_the_time_at_most(piece_s: float) -> None:
    clock = Clock()
    turn = Turn(clock, clock.wait)
    turn.begin()
    pieces = max(3, int(2 * STRETCH_S / piece_s) + 1)
    for _ in range(pieces):
        clock.now += piece_s
        turn.end_of_piece(needed)
    turn.end()
    assert clock.waited_s == pytest.approx(RESTS * pieces * piece_s)


def test_what_is_too_little_for_a_rest_is_rested_for_at_the_end() -> None:
    clock = Clock()
    turn = Turn(clock, clock.wait)
    for _ in range(1000):
        turn.begin()
        clock.now += 0.001
        turn.end_of_piece(needed)
        turn.end()
    assert clock.waited_s == pytest.approx(RESTS * 1.0)


@pytest.mark.parametrize("who", ["writes", "checks"])
def test_it_waits_for_as_long_as_somebody_else_is_at_work_and_what_it_waited_is_no_work_of_its_own(
    who: str,
) -> None:
    clock = Clock()
    turn = Turn(clock, clock.wait)
    turn.others(who, True)
    clock.meanwhile = [lambda: None] * 9 + [lambda: turn.others(who, False)]
    turn.begin()
    assert clock.waited_s == 10
    turn.others(who, True)
    clock.meanwhile = [lambda: turn.others(who, False)]
    turn.end_of_piece(needed)
    assert clock.waited_s == 11
    turn.end_of_piece(needed)
    turn.end()
    assert clock.waited_s == 11


def test_all_others_must_have_ended() -> None:
    clock = Clock()
    turn = Turn(clock, clock.wait)
    for who in ("writes", "checks"):
        turn.others(who, True)
    clock.meanwhile = [
        lambda: turn.others("writes", False), lambda: turn.others("writes", False),
        lambda: turn.others("checks", False),
    ]  # fmt: skip
    turn.begin()
    assert clock.waited_s == 3


def test_it_is_given_up_when_it_is_not_needed_any_more_also_in_the_middle_of_a_rest_or_a_wait() -> None:
    clock = Clock()
    turn = Turn(clock, clock.wait)
    answers = iter([False])
    with pytest.raises(GivenUp):
        turn.end_of_piece(lambda: next(answers))
    clock.now += 100.0
    answers = iter([True, True, False])
    with pytest.raises(GivenUp):
        turn.end_of_piece(lambda: next(answers))
    assert clock.waited_s == 2  # of 700: it looks once a second
    turn.others("writes", True)
    answers = iter([True, False])
    with pytest.raises(GivenUp):
        turn.end_of_piece(lambda: next(answers))
    assert clock.waited_s == 3


def test_a_thread_that_waits_goes_on_at_once_when_the_last_other_has_ended() -> None:
    turn, begun, waits = Turn(), threading.Event(), threading.Event()

    def wait(changed: threading.Condition, _s: float) -> None:
        waits.set()
        changed.wait()  # for ever, unless it is told

    turn = Turn(wait=wait)
    turn.others("writes", True)

    def read() -> None:
        turn.begin()
        begun.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert waits.wait(60) and not begun.is_set()
    turn.others("writes", False)
    assert begun.wait(60)
    thread.join()
