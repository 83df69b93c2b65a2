"""Streams as the daemon takes them in: no message, whatever it says, is half accepted or harms anybody else."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator

import pytest

from ckptd.errors import NoDaemon, OverBudget, ProtocolError, SharedMemoryTooSmall
from ckptd.limits import MAX_CREDIT_ALL_BYTES, MAX_CREDIT_BYTES, MAX_FRAME_BYTES
from ckptd.link import wire
from stream_desk import StreamDesk

MIB = 1024 * 1024


@pytest.fixture
def desk() -> Iterator[StreamDesk]:
    made = StreamDesk()
    yield made
    made.close()


def refusal_in(replies: list[wire.Reply]) -> Exception:
    refused = [reply for reply in replies if isinstance(reply, wire.Refused)]
    assert refused, replies
    return refused[-1].error.exception()


def state_in(replies: list[wire.Reply]) -> tuple[int, int]:
    states = [reply for reply in replies if isinstance(reply, wire.StreamState)]
    return states[-1].have, states[-1].upto


def test_a_streamed_snapshot_is_accepted_once_it_is_whole_and_only_once(desk: StreamDesk) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, os.urandom(3 * MIB + 5))
    assert state_in(client.ask(begin)) == (0, len(whole))
    assert state_in(client.send(begin, whole, 0, MIB)) == (MIB, len(whole))
    assert desk.pipeline.accepted == {}
    (accepted,) = client.send(begin, whole, MIB, len(whole))
    assert isinstance(accepted, wire.Accepted) and (accepted.snapshot, accepted.sequence) == (1, 1)
    assert desk.pipeline.content[1] == whole[: 3 * MIB + 5]
    (again,) = client.ask(begin)
    assert isinstance(again, wire.Accepted) and again.sequence == 1
    assert len(desk.pipeline.accepted) == 1


def test_a_wrong_frame_is_refused_at_once_and_what_came_before_it_stays(desk: StreamDesk) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, os.urandom(2 * MIB))
    client.ask(begin)
    client.send(begin, whole, 0, MIB)
    changed = bytearray(whole[MIB : 2 * MIB])
    changed[77] ^= 1
    replies = client.ask(client.frame(begin, whole, MIB, 2 * MIB), bytes(changed))
    assert "not the bytes that were sent" in str(refusal_in(replies))
    assert state_in(client.ask(begin)) == (MIB, len(whole))
    for offset in (0, 2 * MIB, 2**62):
        assert isinstance(refusal_in(client.send(begin, whole, MIB, 2 * MIB, offset=offset)), ProtocolError)
    for field in ("snapshot", "generation"):
        assert isinstance(refusal_in(client.send(begin, whole, MIB, 2 * MIB, **{field: 9})), ProtocolError)
    client.ask(begin)
    (accepted,) = client.send(begin, whole, MIB, len(whole))
    assert isinstance(accepted, wire.Accepted)
    assert desk.pipeline.content[1] == whole[: 2 * MIB]


def test_another_connection_of_the_client_goes_on_where_the_first_one_ended(desk: StreamDesk) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, os.urandom(2 * MIB))
    client.ask(begin)
    client.send(begin, whole, 0, MIB)
    client.identity = b"another"
    assert state_in(client.ask(begin)) == (MIB, len(whole))
    client.send(begin, whole, MIB, len(whole))
    assert desk.pipeline.content[1] == whole[: 2 * MIB]


def test_more_than_was_granted_is_refused(desk: StreamDesk) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, bytes(MAX_CREDIT_BYTES + 3 * MIB))
    assert state_in(client.ask(begin)) == (0, MAX_CREDIT_BYTES)
    beyond = MAX_CREDIT_BYTES + 1
    frame = client.frame(begin, whole, 0, beyond)
    assert "than was granted" in str(refusal_in(client.ask(frame, whole[:beyond])))


def test_what_waits_in_memory_stays_within_the_credit_however_often_a_stream_is_begun(
    desk: StreamDesk,
) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, bytes(MAX_CREDIT_BYTES + MIB))
    client.ask(begin)
    holds = [os.pipe() for _ in range(2)]

    def hold(number: int) -> None:
        desk.hasher.submit(lambda: os.read(holds[number][0], 1), lambda _: None)

    def send_all() -> None:
        for start in range(0, MAX_CREDIT_BYTES, MAX_FRAME_BYTES):
            frame = client.frame(begin, whole, start, start + MAX_FRAME_BYTES)
            piece = memoryview(whole)[start : start + MAX_FRAME_BYTES]
            desk.streams.handle(client.identity, wire.encode(frame), piece, leaving=False)

    before = len(desk.sent)
    try:
        hold(0)
        for _ in range(3):
            desk.streams.handle(client.identity, wire.encode(begin), None, leaving=False)
        hold(1)
        send_all()  # before it is said how much is here: a stream that goes on from there sends the same again
        os.write(holds[0][1], b"x")
        while not any(isinstance(reply, wire.StreamState) for _, reply in desk.sent[before:]):
            select.select([desk.hasher], [], [], 60)
            desk.hasher.deliver()
        send_all()
        refused = sum(isinstance(reply, wire.Refused) for _, reply in desk.sent[before:])
        assert (2 * MAX_CREDIT_BYTES // MAX_FRAME_BYTES - refused) * MAX_FRAME_BYTES <= MAX_CREDIT_BYTES
    finally:
        for _, writing in holds:
            os.write(writing, b"x")
        desk.settle()
        for fd in (fd for pair in holds for fd in pair):
            os.close(fd)


def test_who_is_not_attached_or_has_another_token_can_not_stream(desk: StreamDesk) -> None:
    mine, other = desk.client("mine"), desk.client("other")
    whole, begin = mine.snapshot(1, bytes(100))
    assert "not attached" in str(refusal_in(other.ask(wire.StreamBegin(**_fields(begin, token="x")))))
    assert "not attached" in str(
        refusal_in(other.ask(wire.StreamBegin(**_fields(begin, client_id="0" * 32))))
    )
    mine.ask(begin)
    assert "no such stream" in str(refusal_in(other.send(begin, whole, 0, len(whole))))
    (accepted,) = mine.send(begin, whole, 0, len(whole))
    assert isinstance(accepted, wire.Accepted)


def _fields(begin: wire.StreamBegin, **changed: object) -> dict[str, object]:
    return {name: getattr(begin, name) for name in begin.__struct_fields__} | changed


def test_a_snapshot_larger_than_the_memory_there_is_is_refused_with_what_to_do(desk: StreamDesk) -> None:
    client = desk.client()
    desk.free_bytes = 10 * MIB
    _, begin = client.snapshot(1, bytes(100))
    for size in (11 * MIB, 2**45, 2**62):
        error = refusal_in(client.ask(wire.StreamBegin(**_fields(begin, data_bytes=size))))
        assert isinstance(error, SharedMemoryTooSmall) and error.todo == "free some"
    assert desk.buffers.of(client.id) == []
    whole, begin = client.snapshot(2, bytes(MIB))
    client.ask(begin)
    assert isinstance(client.send_all(begin, whole)[-1], wire.Accepted)


def test_memory_to_receive_in_is_held_against_the_budget() -> None:
    desk = StreamDesk(most_staged=3 * MIB)
    client = desk.client()
    assert isinstance(refusal_in(client.ask(client.snapshot(1, bytes(4 * MIB))[1])), OverBudget)
    whole, begin = client.snapshot(2, bytes(2 * MIB))
    client.ask(begin)
    client.send_all(begin, whole)
    # A second buffer would be over it: it is waited for the first, not refused.
    _, third = client.snapshot(3, bytes(2 * MIB))
    assert state_in(client.ask(third)) == (0, 0)
    before = len(desk.sent)
    desk.written(client, 2)
    assert state_in([reply for _, reply in desk.sent[before:]])[1] > 0
    desk.close()


def test_two_snapshots_may_lie_with_the_daemon_and_the_third_waits_for_memory(desk: StreamDesk) -> None:
    client = desk.client()
    for number in (1, 2):
        whole, begin = client.snapshot(number, os.urandom(MIB))
        client.ask(begin)
        assert isinstance(client.send_all(begin, whole)[-1], wire.Accepted)
    whole, begin = client.snapshot(3, os.urandom(MIB))
    assert state_in(client.ask(begin)) == (0, 0)
    assert isinstance(refusal_in(client.send(begin, whole, 0, len(whole))), ProtocolError)
    before, memory = len(desk.sent), desk.buffers.of(client.id)
    desk.written(client, 1)
    assert state_in([reply for _, reply in desk.sent[before:]]) == (0, len(whole))
    assert isinstance(client.send_all(begin, whole)[-1], wire.Accepted)
    assert desk.buffers.of(client.id) == memory and len(memory) == 2


def test_what_a_dead_client_streamed_half_is_freed_and_what_was_accepted_is_kept_until_written(
    desk: StreamDesk,
) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, os.urandom(MIB))
    client.ask(begin)
    client.send_all(begin, whole)
    half, begin = client.snapshot(2, os.urandom(MIB))
    client.ask(begin)
    client.send(begin, half, 0, MIB)
    desk.streams.forget(client.session)
    desk.settle()
    assert desk.buffers.of(client.id) == [] and desk.buffers.unwritten() == 1
    assert isinstance(refusal_in(client.send(begin, half, MIB, len(half))), ProtocolError)
    desk.written(client, 1)
    assert desk.buffers.unwritten() == 0
    assert not desk.buffers.owns(desk.pipeline.accepted[client.id, 1].slot)


def test_clients_share_the_credit_and_one_that_stopped_does_not_keep_it(desk: StreamDesk) -> None:
    clients = [desk.client(f"run-{number}") for number in range(6)]
    begins = [client.snapshot(1, bytes(MAX_CREDIT_BYTES))[1] for client in clients]
    granted = [state_in(client.ask(begin))[1] for client, begin in zip(clients, begins, strict=True)]
    assert sum(granted) <= MAX_CREDIT_ALL_BYTES
    assert granted[:4] == [MAX_CREDIT_BYTES] * 4 and granted[4:] == [0, 0]
    desk.now += 60.0
    desk.streams.look()
    latest = {to: reply for to, reply in desk.sent if isinstance(reply, wire.StreamState)}
    assert latest[clients[4].identity].upto > 0 and latest[clients[5].identity].upto > 0
    assert sum(state.upto - state.have for state in latest.values()) <= MAX_CREDIT_ALL_BYTES


def test_a_daemon_whose_grace_is_over_takes_no_more(desk: StreamDesk) -> None:
    client = desk.client()
    whole, begin = client.snapshot(1, bytes(MIB))
    client.ask(begin)
    for message, piece in ((begin, None), (client.frame(begin, whole, 0, MIB), memoryview(whole)[:MIB])):
        desk.streams.handle(client.identity, wire.encode(message), piece, leaving=True)
        assert isinstance(refusal_in([desk.sent[-1][1]]), NoDaemon)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_in_nothing_but_the_snapshot_is_accepted(desk: StreamDesk, seed: int) -> None:
    chance = random.Random(seed)
    client, other = desk.client("mine"), desk.client("other")
    whole, begin = client.snapshot(1, chance.randbytes(300_000))
    size, sent = 50_000, 0
    client.ask(begin)
    while not desk.pipeline.accepted:
        assert sent < 400
        sent += 1
        have = state_in(client.ask(begin))[0]
        for _ in range(chance.randrange(4)):
            _disturb(chance, chance.choice((client, other)), begin, whole, have)
        client.ask(begin)
        if chance.random() < 0.8:
            client.send(begin, whole, have, min(have + size, len(whole)))
    ((key, _),) = desk.pipeline.accepted.items()
    assert key == (client.id, 1)
    assert desk.pipeline.content[1] == whole[:300_000]


def _disturb(chance: random.Random, client: object, begin: wire.StreamBegin, whole: bytes, have: int) -> None:
    start = chance.choice((have, 0, chance.randrange(len(whole)), 2**62))
    piece = chance.choice((b"", chance.randbytes(1000), whole[have : have + 1000], whole, None))
    frame = wire.StreamFrame(
        id=chance.randrange(10**6), snapshot=chance.choice((1, 2)), generation=chance.choice((1, 2)),
        offset=start, sha256=chance.randbytes(32),
    )  # fmt: skip
    data = bytearray(wire.encode(chance.choice((frame, begin))))
    for _ in range(chance.randrange(3)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    client.desk.ask(client.identity, bytes(data), piece)  # type: ignore[attr-defined]
