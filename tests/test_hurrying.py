from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from ckptd.limits import LARGE_FROM_BYTES
from ckptd.link.hurrying import PATIENCE_S, Hurrying
from ckptd.link.session import Session
from ckptd.link.wire import Hurry


@pytest.fixture
def said() -> list[tuple[int, bool]]:
    """Snapshot, and whether its proof is waited for."""
    return []


@pytest.fixture
def hurrying(said: list[tuple[int, bool]]) -> Hurrying:
    def send(message: Hurry) -> int:
        said.append((message.snapshot, message.verified))
        return len(said)

    return Hurrying(cast(Session, SimpleNamespace(record=None, send=send)), "a" * 32)


def test_who_waits_for_something_large_says_so_at_once_and_once(
    hurrying: Hurrying, said: list[tuple[int, bool]]
) -> None:
    hurrying.staged(LARGE_FROM_BYTES)
    for _ in range(2):
        hurrying.say(1, 0, 0.0)
    hurrying.say(0, 1, 0.0)
    assert said == [(1, False), (1, True)]


def test_who_waits_for_something_small_says_so_once_it_takes_long(
    hurrying: Hurrying, said: list[tuple[int, bool]]
) -> None:
    hurrying.staged(LARGE_FROM_BYTES - 1)
    hurrying.say(1, 1, 0.0)
    assert said == []
    hurrying.say(1, 1, PATIENCE_S)
    assert said == [(1, False), (1, True)]


def test_another_daemon_is_told_anew(hurrying: Hurrying, said: list[tuple[int, bool]]) -> None:
    for _ in range(2):
        hurrying.say(1, 0, PATIENCE_S)
        hurrying.forgotten()
    assert said == [(1, False)] * 2
