from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.lifecycle import Event
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.sessions import Process, Session, Sessions
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.waiting import WaitingList
from ckptd_daemon.core.who_waits import Writes, proof_is_waited_for, somebody_waits

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


@pytest.mark.parametrize(
    ("slot_bytes", "others_give_way"), [(4 << 20, [True, True]), (1 << 20, [False, True])]
)
def test_others_give_way_to_a_large_write_at_once_and_to_a_small_one_once_it_takes_long(
    slot_bytes: int, others_give_way: list[bool]
) -> None:
    snapshots = [Snapshot("r", ONE, 1, 1, cast(Slot, SimpleNamespace(capacity=slot_bytes)))]
    pipeline = SimpleNamespace(busy=lambda: bool(snapshots), unwritten=lambda: snapshots)
    clock = [100.0]
    writes = Writes(cast(Pipeline, pipeline), lambda: clock[0])
    seen = [writes.under_way()]
    clock[0] += 1
    assert [*seen, writes.under_way()] == others_give_way
    again = snapshots.pop()
    assert not writes.under_way()
    snapshots.append(again)
    assert writes.under_way() is others_give_way[0]  # it counts from its own beginning


def committed(number: int, *events: Event) -> Snapshot:
    snapshot = Snapshot("r", ONE, number, number, None)
    for event in (Event.WRITE_STARTED, Event.FOLDER_RENAMED, *events):
        snapshot.becomes(event)
    return snapshot


def provers(*known: Snapshot, drained_to_proof: bool = False, unwritten: Sequence[Snapshot] = ()) -> Any:
    """Client ONE, which has said that it waits for 5 to be written and for 3 to be verified."""
    session = Session(ONE, "r", cast(Process, None), b"x")
    session.hurry(5, verified=False)
    session.hurry(3, verified=True)

    def find(run: str, client_id: str, number: int) -> Snapshot | None:
        return next(
            (one for one in known if (one.run, one.client_id, one.number) == (run, client_id, number)), None
        )

    pipeline = SimpleNamespace(
        find=find, proof_is_waited_for=lambda: drained_to_proof, unwritten=lambda: list(unwritten)
    )
    sessions = Sessions()
    sessions.add(session)
    return SimpleNamespace(pipeline=pipeline, sessions=sessions)


def test_a_client_waits_for_a_proof_until_that_snapshot_is_proved_or_can_not_be() -> None:
    assert proof_is_waited_for(provers(committed(3)))
    assert proof_is_waited_for(
        provers(Snapshot("r", ONE, 3, 3, None))
    )  # its writing is hurried, and then this
    for over in (Event.PROVED, Event.FAULT_FOUND, Event.VANISHED):
        assert not proof_is_waited_for(provers(committed(3, over)))
    assert not proof_is_waited_for(provers(committed(5)))  # that it waits for to be written alone
    assert not proof_is_waited_for(provers())


def test_who_drains_so_far_and_a_write_that_waits_for_room_wait_for_proofs_too() -> None:
    assert proof_is_waited_for(provers(drained_to_proof=True))
    waits = Snapshot("r", ONE, 5, 5, None, waits_for_room=True)
    assert proof_is_waited_for(provers(unwritten=[waits]))
    assert not proof_is_waited_for(provers(unwritten=[Snapshot("r", ONE, 5, 5, None)]))
    assert not proof_is_waited_for(provers(unwritten=[Snapshot("r", ONE, 6, 6, None, waits_for_room=True)]))


def test_only_a_drain_to_the_proof_waits_for_proofs() -> None:
    waiting = WaitingList()
    waiting.add([committed(3), Snapshot("r", ONE, 4, 4, None)], verified=False, reply=int, owner=b"x")
    assert not waiting.any_for_proof()
    waiting.add([committed(3)], verified=True, reply=int, owner=b"x")
    assert waiting.any_for_proof()
