"""The daemon's answers, in this process: no message, whatever it says, harms anybody else."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptd.disk.rootdir import Root, own_start
from ckptd.errors import (
    BadRoot,
    CkptdError,
    InvalidArgument,
    NoDaemon,
    ProtocolError,
    RunTaken,
    SaveFailed,
    SharedMemoryTooSmall,
)
from ckptd.link import wire
from ckptd.snapshot.slots import HEADER_BYTES, Slot, SlotState
from ckptd_daemon.core import sessions
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.endpoint import Endpoint
from ckptd_daemon.core.lookup import MAX_WAITING_QUESTIONS, Lookup
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.room import Room
from ckptd_daemon.core.service import MAX_WAITING_DRAINS, MAX_WAITING_DRAINS_ALL, Service
from ckptd_daemon.core.sessions import Process, Session
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.streams import Streams
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.budget import Budget
from ckptd_daemon.series.settings_file import Settings
from daemon_parts import Places, descriptor_of, fill_slot, new_client_id, places_in, slot_size
from fake_catalogue import FakeCatalogue, FakeCommit

ME = b"me"
PID, STARTED = own_start()


class Desk:
    """A service with fakes behind it; what it sends is kept per connection."""

    def __init__(self, places: Places) -> None:
        self.events: list[str] = []
        self.catalogues: dict[str, FakeCatalogue] = {}
        self.root = Root.open(places.root, create=True)
        self.commit = FakeCommit(self.events)
        self.disk = Disk(self.root, Settings(), commit=self.commit, catalogue=self._catalogue)  # type: ignore[arg-type]
        self.free_bytes, self.now = 10**9, 0.0
        self.pool = SlotPool(self.root.slot_dir(), rooms=lambda _: [Room("shm", self.free_bytes, "more")])
        self.maker = Worker("test-maker")
        self.sent: list[tuple[bytes, wire.Reply]] = []
        self.gone: set[bytes] = set()
        self.said: list[str] = []
        self.clients = Clients(
            daemon_id="d", disk=self.disk, pool=self.pool, maker=self.maker, send=self.send,
            say=self.said.append, verify=lambda run, name: None, budget=Budget(),
        )  # fmt: skip
        self.clients.pipeline = Pipeline(self.disk, self.pool, self.clients, lambda: 0.0)
        self.hasher = Worker("test-hasher")
        self.clients.streams = Streams(
            self.clients.sessions, self.hasher, self.maker, self.send, lambda: self.now, self.clients.staged
        )
        self.clients.streams.pipeline = self.clients.pipeline
        lookup = Lookup(self.disk, self.clients.pipeline)
        self.service = Service(
            clients=self.clients, pipeline=self.clients.pipeline, pool=self.pool, lookup=lookup,
            send=self.send, status=dict,
        )  # fmt: skip
        for worker in (self.disk.worker, self.maker, self.hasher):
            worker.start()

    def _catalogue(self, root: Root, run: str) -> Any:
        return self.catalogues.setdefault(run, FakeCatalogue(run, self.events))

    def send(self, identity: bytes, message: wire.Reply) -> bool:
        wire.decode_reply(wire.encode(message))  # what is sent can be read
        if identity in self.gone:
            return False
        self.sent.append((identity, message))
        return True

    def settle(self) -> None:
        for worker in (self.disk.worker, self.maker, self.disk.worker):
            idle: list[None] = []
            worker.submit(lambda: None, lambda _, idle=idle: idle.append(None))
            while not idle:
                select.select([worker], [], [], 60)
                worker.deliver()

    def ask(self, message: wire.Request, identity: bytes = ME) -> list[wire.Reply]:
        before = len(self.sent)
        self.service.handle(identity, wire.encode(message))
        self.settle()
        return [reply for to, reply in self.sent[before:] if to == identity]

    def attach(self, client_id: str, run: str = "default", identity: bytes = ME, **fields: Any) -> wire.Reply:
        given = {"protocol": wire.PROTOCOL, "pid": PID, "pid_started": STARTED, "version": "t"} | fields
        return self.ask(wire.Attach(id=1, run=run, client_id=client_id, **given), identity)[-1]

    def reserve(self, client_id: str, slot_bytes: int = slot_size(100), identity: bytes = ME) -> wire.Reply:
        return self.ask(wire.Reserve(id=2, client_id=client_id, slot_bytes=slot_bytes, slots=2), identity)[-1]

    def close(self) -> None:
        for worker in (self.hasher, self.maker, self.disk.worker):
            worker.stop()
        for session in self.clients.sessions:
            self.clients.sessions.remove(session)
        for slot in self.pool:
            self.pool.remove(slot)
        self.pool.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with places_in(tmp_path) as places:
        made = Desk(places)
        yield made
        made.close()


def refused(reply: wire.Reply, kind: type[Exception]) -> str:
    assert isinstance(reply, wire.Refused), reply
    error = reply.error.exception()
    assert type(error) is kind
    return str(error)


def test_attaching_again_from_another_connection_moves_the_client_there(desk: Desk) -> None:
    client = new_client_id()
    assert isinstance(desk.attach(client), wire.Attached)
    assert isinstance(desk.attach(client, identity=b"again"), wire.Attached)
    refused(desk.reserve(client), ProtocolError)
    assert isinstance(desk.reserve(client, identity=b"again"), wire.Reserved)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"protocol": 99}, ProtocolError),
        ({"pid_started": STARTED + 1}, ProtocolError),
        ({"pid": 2**40}, ProtocolError),
        ({"pid": 0, "pid_started": 0}, ProtocolError),
    ],
)
def test_a_refused_client_leaves_nothing_on_disk(desk: Desk, fields: dict[str, int], kind: type) -> None:
    refused(desk.attach(new_client_id(), **fields), kind)
    assert desk.catalogues == {} and len(desk.clients.sessions) == 0


@pytest.mark.parametrize("run", ["", "..", "a/b", "UPPER", "decisions", "quarantine", "x" * 65, ".ckptd"])
def test_a_bad_run_name_is_refused_by_usage(desk: Desk, run: str) -> None:
    reply = desk.attach(new_client_id(), run)
    assert isinstance(reply, wire.Refused) and reply.error.kind == "InvalidArgument"
    assert desk.catalogues == {}


def test_a_second_client_is_refused_while_the_first_ones_connection_stands(desk: Desk) -> None:
    desk.attach(new_client_id())
    assert f"pid {PID}" in refused(desk.attach(new_client_id(), identity=b"b"), RunTaken)


def test_a_client_that_was_dropped_without_a_word_does_not_hold_the_run_against_its_own_process(
    desk: Desk,
) -> None:
    old = new_client_id()
    desk.attach(old, identity=b"a")
    desk.reserve(old, identity=b"a")
    desk.gone.add(b"a")
    assert isinstance(desk.attach(new_client_id(), identity=b"b"), wire.Attached)
    assert list(desk.pool) == []


def test_while_leaving_a_known_client_may_come_back_and_a_new_one_may_not(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.clients.leaving = "a signal"
    assert isinstance(desk.attach(client), wire.Attached)
    refused(desk.attach(new_client_id(), "other"), NoDaemon)
    desk.clients.closed = True
    refused(desk.attach(client), NoDaemon)


def test_a_push_that_names_a_stale_generation_or_another_clients_slot_is_refused(desk: Desk) -> None:
    mine, other = new_client_id(), new_client_id()
    desk.attach(mine)
    desk.attach(other, "other", b"other")
    desk.reserve(mine)
    slot = desk.pool.of(mine)[0]
    generation = fill_slot(slot, descriptor_of(mine, 1, b"abc"), b"abc")
    for client, identity, fields in (
        (mine, ME, {"generation": generation + 1}),
        (mine, ME, {"snapshot": 2}),
        (mine, ME, {"slot": "../../etc/passwd"}),
        (other, b"other", {}),
    ):
        given = {"slot": slot.name, "generation": generation, "snapshot": 1} | fields
        refused(desk.ask(wire.Push(id=3, client_id=client, **given), identity)[-1], ProtocolError)
    assert desk.commit.written == [] and slot.header().state is SlotState.SEALED
    replies = desk.ask(wire.Push(id=3, client_id=mine, slot=slot.name, generation=generation, snapshot=1))
    assert isinstance(replies[0], wire.Accepted)


def test_a_push_sent_twice_is_accepted_twice_and_written_once(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.reserve(client)
    slot = desk.pool.of(client)[0]
    generation = fill_slot(slot, descriptor_of(client, 1, b"abc"), b"abc")
    push = wire.Push(id=3, client_id=client, slot=slot.name, generation=generation, snapshot=1)
    first, second = desk.ask(push), desk.ask(push)
    assert [type(reply) for reply in first] == [wire.Accepted, wire.Notice]
    assert isinstance(second[0], wire.Accepted) and isinstance(second[1], wire.Notice)
    assert second[1].state == "committed"
    assert len(desk.commit.written) == 1


def test_a_reservation_that_does_not_fit_is_refused_and_makes_nothing(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.free_bytes = 1000
    refused(desk.reserve(client), SharedMemoryTooSmall)
    assert list(desk.pool) == [] and list(desk.pool.folder.iterdir()) == []


def test_a_reservation_waits_for_room_that_a_snapshot_in_flight_will_give_back(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.reserve(client)
    slots = desk.pool.of(client)
    for number, slot in enumerate(slots, 1):
        fill_slot(slot, descriptor_of(client, number, b"abc"), b"abc")
    desk.free_bytes = 0
    assert desk.ask(wire.Reserve(id=7, client_id=client, slot_bytes=10**6, slots=2)) == []
    desk.free_bytes = 10**9
    generation = slots[0].header().generation
    replies = desk.ask(
        wire.Push(id=8, client_id=client, slot=slots[0].name, generation=generation, snapshot=1)
    )
    assert [reply.id for reply in replies if isinstance(reply, wire.Reserved)] == [7]


def test_slots_that_were_outgrown_while_they_were_written_are_removed_once_they_are_free(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.reserve(client)
    small = desk.pool.of(client)
    for number, slot in enumerate(small, 1):
        fill_slot(slot, descriptor_of(client, number, b"abc"), b"abc")
    assert isinstance(desk.reserve(client, 10**6), wire.Reserved)
    assert len(desk.pool.of(client)) == 4
    for number, slot in enumerate(small, 1):
        generation = slot.header().generation
        replies = desk.ask(
            wire.Push(id=8, client_id=client, slot=slot.name, generation=generation, snapshot=number)
        )
        said = [reply for reply in replies if isinstance(reply, wire.Notice) and reply.slot == slot.name]
        assert [reply.slot_free for reply in said] == [False]
        assert not slot.path.exists()
    assert [slot.capacity >= 10**6 for slot in desk.pool.of(client)] == [True, True]


def test_a_newer_reservation_replaces_the_one_that_waits(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.reserve(client)
    for number, slot in enumerate(desk.pool.of(client), 1):
        fill_slot(slot, descriptor_of(client, number, b"abc"), b"abc")
    desk.free_bytes = 0
    assert desk.ask(wire.Reserve(id=7, client_id=client, slot_bytes=10**6, slots=2)) == []
    desk.free_bytes = 10**9
    old, new = desk.ask(wire.Reserve(id=8, client_id=client, slot_bytes=10**7, slots=2))
    assert isinstance(old, wire.Refused) and old.id == 7
    assert isinstance(new, wire.Reserved) and new.id == 8
    assert [info.bytes >= 10**7 for info in new.slots].count(True) == 2


def test_no_client_can_have_more_slots_than_its_share(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    size = slot_size(100)
    for _ in range(5):
        size *= 2
        desk.reserve(client, size)
        for slot in desk.pool.of(client):
            if slot.header().state is SlotState.FREE:
                slot.begin(client, "default", 1)
    assert len(desk.pool.of(client)) == 4


def test_a_destroyed_header_costs_its_own_client_only(desk: Desk) -> None:
    client, other = new_client_id(), new_client_id()
    desk.attach(client)
    desk.attach(other, "other", b"other")
    desk.reserve(client)
    desk.reserve(other, identity=b"other")
    slot = desk.pool.of(client)[0]
    with slot.path.open("r+b") as file:
        file.write(os.urandom(HEADER_BYTES))
    refused(
        desk.ask(wire.Push(id=1, client_id=client, slot=slot.name, generation=1, snapshot=1))[-1],
        ProtocolError,
    )
    assert isinstance(desk.ask(wire.Detach(id=2, client_id=client))[-1], wire.Done)
    assert {s.name for s in desk.pool} == {s.name for s in desk.pool.of(other)}


def test_the_death_of_a_client_whose_run_could_not_be_opened_keeps_its_snapshot_and_the_daemon(
    desk: Desk,
) -> None:
    client, data, process = new_client_id(), b"abc", Process.find(PID, STARTED)
    assert process is not None
    (slot,) = desk.pool.make(client, "unreadable", (PID, STARTED), 1, slot_size(len(data)))
    desk.pool.add(client, [slot])
    fill_slot(slot, descriptor_of(client, 1, data, run="unreadable"), data)
    session = Session(client, "unreadable", process, None)  # as recovery makes it for a process that lives
    desk.clients.sessions.add(session)
    desk.clients.bury(session)
    assert slot.header().state is SlotState.SEALED and slot.header().owner_pid == 0
    assert desk.clients.sessions.get(client) is None
    slot.accept(41)  # as an earlier daemon did
    assert isinstance(desk.attach(new_client_id(), run="unreadable"), wire.Attached)
    desk.settle()
    assert desk.pool.get(client, slot.name) is None
    assert [snapshot.sequence for snapshot in desk.clients.pipeline.books["unreadable"].ledger] == [41]
    assert desk.clients.pipeline.books["unreadable"].next_sequence == 42


def test_a_slot_that_claims_another_run_is_not_written_there(desk: Desk) -> None:
    client, other = new_client_id(), new_client_id()
    desk.attach(client)
    desk.attach(other, "other", b"other")
    desk.reserve(client)
    slot = desk.pool.of(client)[0]
    fill_slot(slot, descriptor_of(client, 1, b"abc", run="other"), b"abc")
    desk.ask(wire.Detach(id=2, client_id=client))
    assert desk.commit.written == [] and desk.pool.of(client) == []


def test_a_snapshot_pushed_before_a_crash_is_found_on_disk(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.catalogues["default"].names[client, 5] = "step-000000005"
    replies = desk.ask(wire.Push(id=3, client_id=client, slot="slot-x", generation=1, snapshot=5))
    assert isinstance(replies[0], wire.Accepted)
    assert isinstance(replies[1], wire.Notice) and replies[1].name == "step-000000005"
    (answer,) = desk.ask(wire.Resolve(id=4, client_id=client, snapshot=5))
    assert isinstance(answer, wire.Notice) and (answer.state, answer.step) == ("committed", 5)


_names = st.sampled_from(["default", "other", "", "..", "slot-x"]) | st.text(max_size=8)
_counts = st.integers(0, 2**62) | st.integers(0, 5)
_ids = st.integers(0, 2**63 - 1)
_FIXED = [new_client_id(), new_client_id()]
_clients = st.sampled_from(_FIXED)
_requests: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        wire.Attach, id=_ids, protocol=st.sampled_from([1, 2]), run=_names, client_id=_clients,
        pid=st.just(PID) | _counts, pid_started=st.just(STARTED) | _counts, version=st.text(max_size=5),
    ),
    st.builds(wire.Reserve, id=_ids, client_id=_clients, slot_bytes=_counts, slots=st.integers(1, 2)),
    st.builds(wire.Push, id=_ids, client_id=_clients, slot=_names, generation=_counts, snapshot=_counts),
    st.builds(wire.Resolve, id=_ids, client_id=_clients, snapshot=_counts),
    st.builds(wire.Drain, id=_ids, run=st.none() | _names, verified=st.booleans()),
    st.builds(wire.Status, id=_ids),
    st.builds(wire.Detach, id=_ids, client_id=_clients),
    st.builds(wire.Stop, id=_ids, grace_s=st.floats()),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), _requests), max_size=12))
def test_no_sequence_of_well_formed_messages_stops_the_service(
    desk: Desk, messages: list[tuple[bytes, Any]]
) -> None:
    desk.free_bytes = 10**6
    for identity, message in messages:
        for reply in desk.ask(message, identity):
            if isinstance(reply, wire.Refused):
                assert "a fault of the daemon" not in reply.error.what
    desk.sent.clear()
    assert isinstance(desk.ask(wire.Status(id=1), b"z")[0], wire.StatusReply)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.tuples(_requests, st.integers(0, 500), st.binary(max_size=4)))
def test_no_bytes_stop_the_service(desk: Desk, data: Any) -> None:
    if isinstance(data, tuple):
        message, at, patch = data
        raw = bytearray(msgspec.msgpack.encode(message))
        raw[at % len(raw) : at % len(raw) + len(patch)] = patch
        data = bytes(raw)
    desk.service.handle(b"fuzz", data)
    desk.settle()


def test_a_slot_object_of_the_test_is_the_pools(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    reply = desk.reserve(client)
    assert isinstance(reply, wire.Reserved)
    opened = Slot.open(desk.pool.folder / reply.slots[0].name)
    assert opened.header().owner_pid == PID and opened.header().run == "default"
    opened.close()


def test_a_regular_file_at_the_sockets_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    path.write_text("mine")
    with pytest.raises(BadRoot, match="taken"):
        Endpoint(path)
    assert path.read_text() == "mine"


def test_what_waits_is_told_in_order_with_the_slots_it_lies_in(desk: Desk) -> None:
    client_id = new_client_id()
    desk.clients.pipeline.opened("default", desk.disk.open_run("default"))
    desk.commit.errors += [SaveFailed("broken")] * 3
    for number in (1, 2):
        (slot,) = desk.pool.make(client_id, "default", (1, 1), 1, slot_size(3))
        desk.pool.add(client_id, [slot])
        fill_slot(slot, descriptor_of(client_id, number, b"abc"), b"abc")
        desk.clients.pipeline.accept(slot, slot.header())
    private = Slot.anonymous("stream", slot_size(3), client_id=client_id, run="default")
    fill_slot(private, descriptor_of(client_id, 3, b"abc"), b"abc")
    desk.clients.pipeline.accept(private, private.header())
    (reply,) = desk.ask(wire.Waiting(id=9, run="default"))
    assert isinstance(reply, wire.WaitingReply)
    held = {slot.header().snapshot: slot.name for slot in desk.pool} | {3: ""}
    seen = [(one.client_id, one.snapshot, one.slot) for one in reply.snapshots]
    assert seen == [(client_id, number, held[number]) for number in (1, 2, 3)]
    assert [one.sequence for one in reply.snapshots] == sorted(one.sequence for one in reply.snapshots)
    (none,) = desk.ask(wire.Waiting(id=10, run="other"))
    assert isinstance(none, wire.WaitingReply) and none.snapshots == []
    (refused,) = desk.ask(wire.Waiting(id=11, run="../x"))
    assert isinstance(refused, wire.Refused)


def test_a_connection_has_few_requests_to_drain_at_once_and_others_have_theirs(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.reserve(client)
    with desk.commit.held:
        slot = desk.pool.of(client)[0]
        generation = fill_slot(slot, descriptor_of(client, 1, b"abc"), b"abc")
        push = wire.Push(id=3, client_id=client, slot=slot.name, generation=generation, snapshot=1)
        desk.service.handle(ME, wire.encode(push))
        for number in range(MAX_WAITING_DRAINS + 1):
            desk.service.handle(ME, wire.encode(wire.Drain(id=10 + number, run=None)))
        refused(desk.sent[-1][1], InvalidArgument)
        desk.service.handle(b"other", wire.encode(wire.Drain(id=99, run=None)))
        assert desk.clients.pipeline.waiting() == MAX_WAITING_DRAINS + 1
        for number in range(MAX_WAITING_DRAINS_ALL):  # those who ask and go, one after the other
            desk.clients.pipeline.when_settled(
                None, verified=False, owner=b"%d" % number, reply=lambda failed: None
            )
        desk.service.handle(b"late", wire.encode(wire.Drain(id=98, run=None)))
        refused(desk.sent[-1][1], InvalidArgument)
    desk.settle()
    answered = [reply.id for _, reply in desk.sent if isinstance(reply, wire.Drained)]
    assert sorted(answered) == [*range(10, 10 + MAX_WAITING_DRAINS), 99]


def test_questions_that_the_disk_is_long_in_answering_are_few_for_each_connection(desk: Desk) -> None:
    client = new_client_id()
    desk.attach(client)
    desk.reserve(client)
    slot = desk.pool.of(client)[0]
    with desk.commit.held:
        generation = fill_slot(slot, descriptor_of(client, 1, b"abc"), b"abc")
        push = wire.Push(id=3, client_id=client, slot=slot.name, generation=generation, snapshot=1)
        desk.service.handle(ME, wire.encode(push))
        for number in range(MAX_WAITING_QUESTIONS):
            message: wire.Request = wire.Resolve(id=10, client_id=client, snapshot=100 + number)
            if number % 2:
                message = wire.Push(id=10, client_id=client, slot="x", generation=1, snapshot=100 + number)
            desk.service.handle(ME, wire.encode(message))
        assert desk.sent[-1][1].id == 3
        for message in (
            wire.Resolve(id=20, client_id=client, snapshot=99),
            wire.Push(id=20, client_id=client, slot="x", generation=1, snapshot=99),
        ):
            desk.service.handle(ME, wire.encode(message))
            assert "too many questions" in refused(desk.sent[-1][1], CkptdError)
        desk.service.handle(b"other", wire.encode(wire.Resolve(id=21, client_id=client, snapshot=99)))
    desk.settle()
    answers = [reply.id for _, reply in desk.sent if isinstance(reply, (wire.Notice, wire.Refused))]
    assert answers.count(10) == MAX_WAITING_QUESTIONS and answers.count(21) == 1
    (again,) = desk.ask(wire.Resolve(id=22, client_id=client, snapshot=99))
    assert isinstance(again, wire.Notice) and again.state == "unknown"


def test_when_there_are_as_many_clients_as_may_be_nothing_is_made_for_one_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_CLIENTS", 1)
    desk.attach(new_client_id())
    assert "too many clients" in refused(desk.attach(new_client_id(), "other"), CkptdError)
    assert "other" not in desk.catalogues
