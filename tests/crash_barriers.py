"""Each sync of ours taken out of a trace: some state that a crash then leaves must break a promise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from crash_judge import faults
from crash_seen import Eye
from crash_states import State, idle, states
from crash_trace import Trace

UP: Final = "durable.fsync_dir < durable.sync_upwards < "
ROOT_OPENED: Final = f"{UP}rootdir._make_service_dir < rootdir.open"
RUN_MADE: Final = f"{UP}durable.make_real_dir < catalogue._open < catalogue.open"
DECISIONS_MADE: Final = f"{UP}durable.make_real_dir < decisions._write < decisions.write_birth"

#: Barriers without which no state breaks a promise, and why they are there all the same.
REDUNDANT: Final = {
    ROOT_OPENED: "a new run syncs as far up; but the policy is written before there is a run",
    RUN_MADE: "the root was synced when it was opened, and is when decisions are made; neither knows of the other",
    DECISIONS_MADE: "the first commit syncs RUN before it is acknowledged",
    "durable.fsync_dir < durable.rename_new < quarantine.quarantine < catalogue._move_away":
        "what comes back after a power cut fails its check again; without it, a file system whose renames between two"
        " folders aren't atomic could lose the corrupt checkpoint",
}  # fmt: skip

#: Barriers that are needed, but not each time; when they aren't.
_AFTER_QUARANTINE: Final = "behind a quarantined checkpoint nothing is left of the line that is forked from"
SOMETIMES: Final = {
    "durable.write_new < decisions._write < decisions.write_fork": _AFTER_QUARANTINE,
    "durable.fsync_dir < durable.rename_new < decisions._write < decisions.write_fork": _AFTER_QUARANTINE,
}

#: Those that are redundant only while the others are there.
STAND_INS: Final = frozenset({ROOT_OPENED, RUN_MADE, DECISIONS_MADE})


def first_fault(found: Iterable[State], eye: Eye) -> str:
    """The first state that breaks a promise, in words; "" if none does."""
    for state in found:
        if wrong := faults(state, eye):
            return f"cut {state.cut} ({state.kind}): {wrong[0]}; on disk: {sorted(state.tree)}"
    return ""


def without_it(trace: Trace, barriers: Collection[str], eye: Eye, *, most: int | None = None) -> str:
    """The first promise that is broken once these barriers are gone from a trace; "" if none is.

    Args:
        most: Of the states that are possible only without them so many are tried; None for all.
    """
    gone = {at for at, barrier in trace.syncs().items() if barrier in barriers}
    if gone <= idle(trace):
        return ""
    return first_fault(_new(trace, trace.without(gone), min(gone), most), eye)


def _new(trace: Trace, changed: Trace, first_cut: int, most: int | None) -> Iterator[State]:
    """States of the changed trace that the usual one hasn't left."""
    usual = {state.digest for state in states(trace, most=4)}
    tried = 0
    for state in states(changed, most=4, first_cut=first_cut):
        if state.digest in usual:
            continue
        tried += 1
        yield state
        if tried == most:
            return


def each_sync(trace: Trace, eye: Eye, *, most: int) -> dict[str, list[str]]:
    """What becomes of each single sync, by barrier: "needed", "needed in its place" or "not needed".

    Needed: without it a promise is broken. Needed in its place: it is, when the sync comes only after the next rename.
    """
    done_nothing = idle(trace)
    found: dict[str, list[str]] = {}
    for at, barrier in trace.syncs().items():
        if at in done_nothing:
            continue
        later = trace.delayed(at)
        word = "not needed"
        if first_fault(_new(trace, trace.without({at}), at, most), eye):
            word = "needed"
            if later is not None and first_fault(_new(trace, later, at, most), eye):
                word = "needed in its place"
        found.setdefault(barrier, []).append(word)
    return found
