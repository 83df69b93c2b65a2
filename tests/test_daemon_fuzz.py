"""Random bytes at the real socket: the daemon lives, and a client beside them is served."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.limits import MAX_MESSAGE_BYTES
from ckptd.link import wire
from daemon_parts import BareClient, DaemonProcess, Places, places_in

pytestmark = pytest.mark.slow


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@contextlib.contextmanager
def raw_connection(places: Places) -> Iterator[zmq.Socket[bytes]]:
    record = DaemonRecord.read(Root.for_reading(places.root))
    assert record is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDTIMEO, 10_000)
        socket.connect(record.endpoint)
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
