from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.who_waits import somebody_waits

ONE, OTHER = "a" * 32, "b" * 32


def clients(waits_for: int | None = None, **changes: Any) -> Any:
    """Client ONE has snapshots 3 and 4 still to be written, and waits for its own up to that number."""
    unwritten = [Snapshot("r", ONE, number, number, None) for number in (3, 4)]
    sessions = {} if waits_for is None else {ONE: SimpleNamespace(waits_for=waits_for)}
    fields: dict[str, Any] = {
        "leaving": "", "sessions": sessions,
        "pipeline": SimpleNamespace(waiting=lambda: 0, unwritten=lambda: unwritten),
        "streams": SimpleNamespace(any_waited_for=lambda: False), "anybody_reserves": lambda: False,
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("waits_for", "waits"), [(None, False), (0, False), (2, False), (3, True), (4, True)]
)
def test_a_client_waits_while_something_up_to_what_it_named_is_unwritten(
    waits_for: int | None, waits: bool
) -> None:
    assert somebody_waits(clients(waits_for)) is waits


def test_what_another_client_waits_for_is_no_reason() -> None:
    assert not somebody_waits(clients(sessions={OTHER: SimpleNamespace(waits_for=9)}))


def test_who_drains_reserves_or_streams_or_has_the_daemon_leave_waits_too() -> None:
    nothing = clients().pipeline.unwritten
    assert somebody_waits(clients(pipeline=SimpleNamespace(waiting=lambda: 1, unwritten=nothing)))
    assert somebody_waits(clients(streams=SimpleNamespace(any_waited_for=lambda: True)))
    assert somebody_waits(clients(anybody_reserves=lambda: True))
    assert somebody_waits(clients(leaving="a signal"))
