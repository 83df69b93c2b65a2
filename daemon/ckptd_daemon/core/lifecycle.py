"""The life of a snapshot in the daemon, as one transition table.

    staged ──► writing ──► committed ──► verified
      │  ▲        │  │        │  │           │
      │  └────────┘  └► failed│  └► corrupt ◄┘
      │   postponed           └► gone
      └► superseded

A snapshot is *staged* from its acceptance; before that it exists only in its slot. It is *gone* when its
folder was removed (by hand) before it was verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from ckptd.errors import CkptdError


class State(Enum):
    STAGED = "staged"
    WRITING = "writing"
    COMMITTED = "committed"
    VERIFIED = "verified"
    CORRUPT = "corrupt"
    GONE = "gone"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class Event(Enum):
    WRITE_STARTED = "write-started"
    WRITE_POSTPONED = "write-postponed"  #: failed; nobody to tell, or room is about to come: kept in its slot
    FOLDER_RENAMED = "folder-renamed"
    WRITE_FAILED = "write-failed"
    REPLACED_BY_NEWER = "replaced-by-newer"
    PROVED = "proved"
    FAULT_FOUND = "fault-found"
    VANISHED = "vanished"


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.STAGED: {Event.WRITE_STARTED: State.WRITING, Event.REPLACED_BY_NEWER: State.SUPERSEDED},
    State.WRITING: {
        Event.FOLDER_RENAMED: State.COMMITTED,
        Event.WRITE_FAILED: State.FAILED,
        Event.WRITE_POSTPONED: State.STAGED,
    },
    State.COMMITTED: {
        Event.PROVED: State.VERIFIED,
        Event.FAULT_FOUND: State.CORRUPT,
        Event.VANISHED: State.GONE,
    },
    State.VERIFIED: {
        Event.PROVED: State.VERIFIED,
        Event.FAULT_FOUND: State.CORRUPT,
        Event.VANISHED: State.VERIFIED,  # retention removed it, as it should
    },
    State.CORRUPT: {},  # terminal, like those below: the rows are there to say so
    State.GONE: {},
    State.FAILED: {},
    State.SUPERSEDED: {},
}

#: What is still to be written.
UNWRITTEN: Final = frozenset({State.STAGED, State.WRITING})


def after(state: State, event: Event) -> State:
    """The state that event leads to from state.

    Raises:
        CkptdError: The table has no such row; a fault of the daemon, and nothing has changed.
    """
    following = TRANSITIONS[state].get(event)
    if following is None:
        wanted = ", ".join(known.value for known in TRANSITIONS[state]) or "nothing: it is terminal"
        raise CkptdError(
            "no such step in a snapshot's life", where=state.value, seen=event.value, wanted=wanted
        )
    return following
