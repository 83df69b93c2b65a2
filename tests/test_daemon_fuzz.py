"""Random bytes at the real socket: the daemon lives, and a client beside them is served."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import CkptdError
from ckptd.limits import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, MIB
from ckptd.link import wire
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import streamed_bytes
from daemon_parts import BareClient, DaemonProcess, Places, descriptor_of, places_in

pytestmark = pytest.mark.slow


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@contextlib.contextmanager
def raw_connection(places: Places, endpoint: str = "") -> Iterator[zmq.Socket[bytes]]:
    record = DaemonRecord.read(Root.for_reading(places.root))
    assert record is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDTIMEO, 60_000)
        socket.connect(endpoint or record.endpoint)
        yield socket


def noise(chance: random.Random, whole: list[bytes]) -> list[bytes]:
    kind = chance.randrange(5)
    if kind == 0:
        return [chance.randbytes(chance.randrange(300))]
    if kind == 1:
        return [chance.randbytes(chance.randrange(5)) for _ in range(chance.randrange(1, 6))]
    message = bytearray(chance.choice(whole))
    if kind == 2:
        return [bytes(message[: chance.randrange(len(message))])]
    for _ in range(chance.randrange(1, 4)):
        message[chance.randrange(len(message))] = chance.randrange(256)
    return [bytes(message)]


@pytest.mark.parametrize("seed", [1, 2])
def test_random_bytes_do_not_keep_a_daemon_from_serving_its_client(places: Places, seed: int) -> None:
    daemon = DaemonProcess(places)
    try:
        daemon.ready()
        client = BareClient(places.root)
        client.attach()
        client.reserve(1000)
        chance = random.Random(seed)
        victim = client.client_id
        whole = [
            wire.encode(message)
            for message in (
                wire.Reserve(id=1, client_id=victim, slot_bytes=2**40, slots=2),
                wire.Push(id=2, client_id=victim, slot=next(iter(client.slots)), generation=1, snapshot=1),
                wire.Detach(id=3, client_id=victim),
                wire.Resolve(id=4, client_id=victim, snapshot=1),
                wire.Drain(id=5, run="default", verified=True),
            )
        ]
        with raw_connection(places) as socket:
            for number in range(2000):
                socket.send_multipart(whole[number : number + 1] or noise(chance, whole))
            socket.send(bytes(MAX_MESSAGE_BYTES + 1))  # too long: libzmq drops the connection
            client.save(1, b"a" * 1000)
            assert client.wait_for(1, "committed").name == "step-000000001"
        assert client.drain() == 0
        assert len(client.slots) == 2 and all(slot.path.exists() for slot in client.slots.values())
        assert client.status()["runs"][0]["client"]["client_id"] == victim
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) < 60
        client.close()
    finally:
        daemon.kill()


def resources(pid: int) -> tuple[int, int]:
    """(bytes in memory, shared ones left out; descriptors) of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))


def test_a_client_that_floods_the_daemon_is_bounded_and_another_one_saves_beside_it(places: Places) -> None:
    share = 8 * MIB
    daemon = DaemonProcess(places, "--max-client-bytes", str(share))
    try:
        daemon.ready()
        modest, greedy = BareClient(places.root), BareClient(places.root, "greedy")
        for client in (modest, greedy):
            client.attach()
            client.reserve(1000)
        modest.save(1, b"before")
        modest.wait_for(1, "verified")
        memory, descriptors = resources(daemon.pid)
        over = threading.Event()
        flooding = threading.Thread(target=flood, args=(greedy, over))
        flooding.start()
        try:
            for number in range(2, 7):
                modest.save(number, bytes([number]) * 1000)
                modest.wait_for(number, "committed")
                assert bytes_of_slots(places, greedy.client_id) <= share
        finally:
            over.set()
            flooding.join(60)
        now_memory, now_descriptors = resources(daemon.pid)
        assert now_memory - memory < 64 * MIB and now_descriptors - descriptors <= 8
        status = modest.status()
        assert len(next(run for run in status["runs"] if run["run"] == "greedy")["slots"]) <= 4
        modest.close()
        greedy.close()
    finally:
        daemon.kill()
    assert places.checkpoints()[-5:] == [f"step-{number:09d}" for number in range(2, 7)]


def bytes_of_slots(places: Places, client_id: str) -> int:
    """Of those that are there now: with each of its requests others take their place."""
    found = 0
    for path in places.slots():
        if client_id in path.name:
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_size
    return found


def flood(client: BareClient, over: threading.Event) -> None:
    """As fast as the connection takes it, and no answer is read."""
    mine, number = client.client_id, 0
    while not over.is_set():
        number += 1
        size = (MIB << number % 40) + number
        for message in (
            wire.Reserve(id=0, client_id=mine, slot_bytes=size, slots=2),
            wire.Skipped(id=0, client_id=mine, count=number, steps=[number] * 100),
            wire.Supersede(id=0, client_id=mine, snapshot=number, step=number, until=1e9),
            wire.Resolve(id=0, client_id=mine, snapshot=number), wire.Status(id=0), wire.Drain(id=0, run=None),
        ):  # fmt: skip
            with contextlib.suppress(CkptdError):
                client.connection.send(message)


def test_random_bytes_at_the_socket_for_streams_keep_nobody_from_streaming(places: Places) -> None:
    daemon = DaemonProcess(places)
    try:
        daemon.ready()
        client = BareClient(places.root)
        attached = client.attach()
        chance, data = random.Random(1), os.urandom(300_000)
        descriptor = encode(descriptor_of(client.client_id, 1, data))
        begin = wire.StreamBegin(
            id=1, client_id=client.client_id, token=attached.stream_token, snapshot=1, generation=1,
            data_bytes=len(data), descriptor_bytes=len(descriptor), slots=1,
        )  # fmt: skip
        others = [
            wire.encode(message)
            for message in (
                msgspec.structs.replace(begin, token="guessed"),
                msgspec.structs.replace(begin, data_bytes=2**61, token="guessed"),
                wire.StreamFrame(id=2, snapshot=1, generation=1, offset=0, sha256=bytes(32)),
            )
        ]
        with (
            raw_connection(places, attached.stream) as noisy,
            raw_connection(places, attached.stream) as socket,
        ):
            for number in range(1000):
                noisy.send_multipart(others[number : number + 1] or noise(chance, others))
            noisy.send(bytes(MAX_FRAME_BYTES + 4096))  # too long: libzmq drops the connection
            socket.send(wire.encode(begin))
            while not (state := wire.decode_reply(socket.recv())).upto:  # type: ignore[union-attr]
                pass
            total = streamed_bytes(len(data), len(descriptor))
            assert state.upto == total  # type: ignore[union-attr]
            whole = data + bytes(total - len(data) - len(descriptor)) + descriptor
            frame = wire.StreamFrame(
                id=2, snapshot=1, generation=1, offset=0, sha256=hashlib.sha256(whole).digest()
            )
            socket.send_multipart([wire.encode(frame), whole])
            assert client.wait_for(1, "committed").name == "step-000000001"
        assert client.status()["memory"]["staged_bytes"] < 2**20
        client.close()
    finally:
        daemon.kill()
