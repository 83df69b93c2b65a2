from __future__ import annotations

import itertools

import pytest

from ckptd.errors import CkptdError
from ckptd_daemon.core.lifecycle import TRANSITIONS, UNWRITTEN, Event, State, after


def test_every_state_has_its_row_and_every_event_is_used() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_a_step_is_in_the_table_or_refused(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert after(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(CkptdError, match="no such step"):
            after(state, event)


def test_nothing_leads_back_from_written_to_unwritten() -> None:
    for state in set(State) - UNWRITTEN:
        assert not set(TRANSITIONS[state].values()) & UNWRITTEN


def test_corrupt_gone_failed_and_superseded_are_terminal() -> None:
    assert {state for state in State if not TRANSITIONS[state]} == {
        State.CORRUPT,
        State.GONE,
        State.FAILED,
        State.SUPERSEDED,
    }
