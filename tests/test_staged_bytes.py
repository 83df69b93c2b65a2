"""What one client may have and do: bounded in bytes, slots and messages, and nobody else's snapshot is its business."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import pytest

from ckptd.errors import InvalidArgument, OverBudget, ProtocolError
from ckptd.limits import MAX_SKIPPED, MAX_SKIPPED_TOLD
from ckptd.link import wire
from ckptd.snapshot.slots import SlotState
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.series.budget import Budget
from daemon_parts import descriptor_of, fill_slot, new_client_id
from test_service import ME, PID, STARTED, Desk, desk, refused

__all__ = ["desk"]

SIZE = 100 * 4096


def limit(desk: Desk, **budget: int) -> None:
    desk.clients.staged.budget = Budget(**budget)


def reserve(
    desk: Desk, client: str, slot_bytes: int = SIZE, slots: int = 2, identity: bytes = ME
) -> list[Any]:
    request = wire.Reserve(id=2, client_id=client, slot_bytes=slot_bytes, slots=slots)
    return desk.ask(request, identity)


def hold(desk: Desk, client: str, number: int = 1) -> wire.Push:
    """Seal a snapshot in a slot of the client; what pushes it."""
    slot = next(slot for slot in desk.pool.of(client) if slot.header().state is SlotState.FREE)
    generation = fill_slot(slot, descriptor_of(client, number, b"abc"), b"abc")
    return wire.Push(id=3, client_id=client, slot=slot.name, generation=generation, snapshot=number)


# --- the budget -------------------------------------------------------------------------------------


def test_the_budget_names_the_bound_what_was_asked_and_the_fix() -> None:
    budget = Budget(max_staged_bytes=100, max_client_bytes=60)
    budget.check("2 slots", 60, held=0, held_by_all=40)
    with pytest.raises(
        OverBudget, match=r"max_client_bytes.*2 slots.*61 bytes more.*at most 60.*--max-client-bytes"
    ):
        budget.check("2 slots", 61, held=0, held_by_all=0)
    with pytest.raises(OverBudget, match=r"max_staged_bytes.*all clients have 41.*--max-staged-bytes"):
        budget.check("2 slots", 60, held=0, held_by_all=41)
    Budget().check("everything", 2**60, held=2**60, held_by_all=2**61)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "5GB", 2**63])
def test_what_is_no_number_of_bytes_is_no_budget(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_client_bytes"):
        Budget(max_client_bytes=value)


def test_pieces_are_counted_by_client_and_in_all() -> None:
    staged = StagedBytes(Budget(max_client_bytes=10), lambda: [("a", 3), ("b", 4)])
    staged.count_also(lambda: [("a", 5)])
    assert (staged.of("a"), staged.of("b"), staged.of("c"), staged.of()) == (8, 4, 0, 12)
    staged.check("a", "x", 2)
    with pytest.raises(OverBudget):
        staged.check("a", "x", 3)


def test_a_reservation_beyond_the_clients_share_is_refused_and_makes_nothing(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    limit(desk, max_client_bytes=2 * SIZE)
    assert "2 slots of 404.0 KiB" in refused(reserve(desk, client, SIZE + 4096)[-1], OverBudget)
    assert list(desk.pool) == []
    assert isinstance(reserve(desk, client)[-1], wire.Reserved)


def test_a_client_that_asks_for_everything_leaves_the_others_theirs(desk: Desk) -> None:
    greedy, modest = new_client_id(), new_client_id()
    desk.attach(greedy, "greedy", b"greedy")
    desk.attach(modest)
    limit(desk, max_staged_bytes=4 * SIZE, max_client_bytes=2 * SIZE)
    for slot_bytes in (2**62, SIZE * 3 // 2, SIZE, SIZE * 2, SIZE):
        reserve(desk, greedy, slot_bytes, identity=b"greedy")
        assert sum(slot.capacity for slot in desk.pool.of(greedy)) <= 2 * SIZE
    assert isinstance(reserve(desk, modest)[-1], wire.Reserved)
    third = new_client_id()
    desk.attach(third, "third", b"third")
    assert "max_staged_bytes" in refused(reserve(desk, third, identity=b"third")[-1], OverBudget)


def test_within_the_budget_a_state_grows_when_what_is_being_written_has_left_its_slots(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    limit(desk, max_client_bytes=4 * SIZE)
    reserve(desk, client)
    pushes = [hold(desk, client, 1), hold(desk, client, 2)]
    assert reserve(desk, client, 2 * SIZE) == []
    replies = [reply for push in pushes for reply in desk.ask(push)]
    (made,) = [reply for reply in replies if isinstance(reply, wire.Reserved)]
    assert [info.bytes for info in made.slots] == [2 * SIZE] * 2


def test_a_clients_successor_gets_the_memory_that_the_dead_ones_snapshot_gives_back(desk: Desk) -> None:
    dead, next_ = new_client_id(), new_client_id()
    desk.attach(dead, identity=b"dead")
    limit(desk, max_staged_bytes=2 * SIZE)
    reserve(desk, dead, identity=b"dead")
    hold(desk, dead)
    with desk.commit.held:
        desk.service.handle(b"dead", wire.encode(wire.Detach(id=9, client_id=dead)))
        assert desk.commit.begun.wait(60)
        request = wire.Attach(
            id=1, run="other", client_id=next_, protocol=wire.PROTOCOL, pid=PID, pid_started=STARTED, version="t"
        )  # fmt: skip
        desk.clients.pipeline.opened("other", desk.disk.open_run("other"))
        desk.service.handle(ME, wire.encode(request))
        reserve_ = wire.Reserve(id=2, client_id=next_, slot_bytes=SIZE, slots=2)
        desk.service.handle(ME, wire.encode(reserve_))
        assert not [reply for _, reply in desk.sent if isinstance(reply, wire.Refused)]
    desk.settle()
    assert isinstance(desk.sent[-1][1], wire.Reserved)


# --- giving way -------------------------------------------------------------------------------------


def test_only_its_own_client_can_have_a_snapshot_superseded(desk: Desk) -> None:
    mine, other = new_client_id(), new_client_id()
    desk.attach(mine)
    desk.attach(other, "other", b"other")
    reserve(desk, mine)
    with desk.commit.held:
        for number in (1, 2):
            desk.service.handle(ME, wire.encode(hold(desk, mine, number)))
        assert desk.commit.begun.wait(60)
        before = len(desk.sent)
        for client_id in (mine, other):
            ask = wire.Supersede(id=7, client_id=client_id, snapshot=2, step=2, until=1e9)
            desk.service.handle(b"other", wire.encode(ask))
        desk.service.handle(
            ME, wire.encode(wire.Supersede(id=8, client_id=mine, snapshot=1, step=1, until=1e9))
        )
    desk.settle()
    first, foreign = (reply for to, reply in desk.sent[before:] if to == b"other")
    refused(first, ProtocolError)
    assert isinstance(foreign, wire.Done)
    assert [number for _, number, _, _ in desk.commit.written] == [1, 2]


def test_a_question_that_is_sent_twice_is_answered_twice_and_counted_once(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    reserve(desk, client)
    with desk.commit.held:
        for number in (1, 2):
            desk.service.handle(ME, wire.encode(hold(desk, client, number)))
        assert desk.commit.begun.wait(60)
        for message_id in (7, 8):
            ask = wire.Supersede(id=message_id, client_id=client, snapshot=2, step=20, until=1e9)
            desk.service.handle(ME, wire.encode(ask))
        answers = [r for _, r in desk.sent if isinstance(r, wire.Notice) and r.id in (7, 8)]
        assert [(a.state, a.step) for a in answers] == [("superseded", 20)] * 2
        assert desk.clients.pipeline.books["default"].superseded == 1
    desk.settle()
    assert desk.said[0] == "default step 20: superseded"


def test_whoever_asks_for_a_stream_that_is_not_taken_in_yet_is_answered_while_the_disk_is_busy(
    desk: Desk,
) -> None:
    client = new_client_id()
    desk.attach(client)
    reserve(desk, client)
    with desk.commit.held:
        desk.service.handle(ME, wire.encode(hold(desk, client, 1)))
        assert desk.commit.begun.wait(60)
        ask = wire.Supersede(id=7, client_id=client, snapshot=2, step=2, until=1e9)
        desk.service.handle(ME, wire.encode(ask))
        assert [reply for _, reply in desk.sent if reply.id == 7] == [wire.Done(id=7)]


# --- what was skipped -------------------------------------------------------------------------------


def test_each_skipped_snapshot_is_counted_once_and_said_by_step(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client = new_client_id()
    desk.attach(client)
    book = desk.clients.pipeline.books["default"]
    for count, steps in ((1, [3]), (1, [3]), (3, [3, 4, 5]), (2, [3, 4])):
        (reply,) = desk.ask(wire.Skipped(id=4, client_id=client, count=count, steps=steps))
        assert isinstance(reply, wire.Done)
    assert (book.skipped, book.last_skipped) == (3, 5)
    assert [line for line in desk.said if "skipped" in line] == [
        f"default step {n}: skipped" for n in (3, 4, 5)
    ]
    assert [caplog.text.count(f"snapshot.skipped run=default step={n}") for n in (3, 4, 5)] == [1, 1, 1]


def test_what_gave_way_before_it_was_sent_is_counted_apart(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    book = desk.clients.pipeline.books["default"]
    for count, steps in ((1, [3]), (1, [3]), (2, [5])):
        desk.ask(wire.Skipped(id=4, client_id=client, count=count, gave_way=True, steps=steps))
    assert (book.skipped, book.superseded) == (0, 2)
    assert book.last_superseded is not None and book.last_superseded.step == 5
    assert desk.said == [f"default step {step}: superseded" for step in (3, 5)]


def test_the_next_client_of_the_run_counts_on(desk: Desk) -> None:
    for number, client in enumerate((new_client_id(), new_client_id()), 1):
        desk.attach(client)
        desk.ask(wire.Skipped(id=4, client_id=client, count=2, steps=[10 * number]))
        desk.ask(wire.Detach(id=5, client_id=client))
    book = desk.clients.pipeline.books["default"]
    assert (book.skipped, book.last_skipped) == (4, 20)


def test_a_client_that_lies_about_what_it_skipped_is_bounded(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    encode = wire.encode
    for count, steps in ((MAX_SKIPPED + 1, []), (5, [1] * (MAX_SKIPPED_TOLD + 1)), (-1, []), (1, [-1])):
        desk.service.handle(ME, encode(wire.Skipped(id=4, client_id=client, count=count, steps=steps)))
        refused(desk.sent[-1][1], ProtocolError)
    desk.ask(wire.Skipped(id=4, client_id=client, count=MAX_SKIPPED, steps=[]))
    assert desk.clients.pipeline.books["default"].skipped == MAX_SKIPPED
    stranger = secrets.token_hex(16)
    refused(desk.ask(wire.Skipped(id=4, client_id=stranger, count=1, steps=[1]))[-1], ProtocolError)


def test_memory_for_streams_counts_too(desk: Desk) -> None:
    client, other = new_client_id(), new_client_id()
    desk.attach(client)
    limit(desk, max_client_bytes=3 * SIZE)
    reserve(desk, client)
    buffers = desk.clients.streams.buffers
    assert buffers.take(client, "default", SIZE, 2) is None  # it is being made
    assert desk.clients.staged.of(client) == 3 * SIZE
    desk.settle()
    slot = buffers.take(client, "default", SIZE, 2)
    assert slot is not None and desk.clients.staged.of(client) == 3 * SIZE
    slot.begin(client, "default", 1)
    assert buffers.take(client, "default", SIZE, 2) is None
    desk.settle()
    assert buffers.of(client) == [slot] and desk.clients.staged.of(client) == 3 * SIZE
    assert desk.clients.staged.of(other) == 0
    buffers.forget(client)
    assert desk.clients.staged.of() == 2 * SIZE


def test_what_is_made_is_what_was_held_against_the_budget_though_a_larger_request_came_meanwhile(
    desk: Desk,
) -> None:
    client = new_client_id()
    desk.attach(client)
    limit(desk, max_client_bytes=2 * SIZE)
    busy = threading.Event()
    desk.maker.submit(lambda: busy.wait(60), lambda _: None)
    for message_id, slot_bytes in ((1, SIZE), (2, 100 * SIZE)):
        request = wire.Reserve(id=message_id, client_id=client, slot_bytes=slot_bytes, slots=2)
        desk.service.handle(ME, wire.encode(request))
    busy.set()
    desk.settle()
    assert "max_client_bytes" in refused(desk.sent[-1][1], OverBudget)
    assert all(slot.capacity <= SIZE for slot in desk.pool.of(client))
