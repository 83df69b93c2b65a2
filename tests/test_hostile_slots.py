"""A client that writes what it likes into its own slots, also while the daemon reads them."""

from __future__ import annotations

import mmap
import os
import random
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.disk.verification import check
from ckptd.link import wire
from ckptd.snapshot import slot_header
from ckptd.snapshot.slots import Slot
from daemon_parts import BareClient, DaemonProcess, Places, places_in

DATA = bytes(range(256)) * 1500

pytestmark = pytest.mark.slow


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


def scribble(path: Path, over: threading.Event, chance: random.Random) -> None:
    """Headers that are whole and say anything, noise in descriptor and data, as fast as it goes."""
    with path.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as memory:
        whole = bytes(memory[: slot_header.PACKED_BYTES])
        while not over.is_set():
            kind = chance.randrange(4)
            if kind == 0:  # a right CRC over wrong numbers
                raw = bytearray(whole[:-4])
                for at in chance.sample(range(12, 80, 8), 2):
                    struct.pack_into("<Q", raw, at, chance.choice((0, 1, 2, 2**40, 2**63 - 1, 2**64 - 1)))
                struct.pack_into("<I", raw, 12, chance.randrange(6))
                copy = bytes(raw) + struct.pack("<I", zlib.crc32(bytes(raw)))
                start = chance.choice(slot_header.COPIES)
                memory[start : start + len(copy)] = copy
            elif kind == 1:
                memory[: len(whole)] = whole
            else:
                at = chance.randrange(len(memory) - 64)
                memory[at : at + 64] = chance.randbytes(64)


def test_whatever_a_client_writes_into_its_slots_others_save_and_the_daemon_finds_no_fault_in_itself(
    places: Places,
) -> None:
    daemon = DaemonProcess(places)
    chance, over = random.Random(1), threading.Event()
    scribblers: list[threading.Thread] = []
    try:
        daemon.ready()
        modest = ready(BareClient(places.root))
        for round_ in range(1, 9):
            wild = ready(BareClient(places.root, f"wild-{round_}"))
            for number, slot in enumerate(wild.slots.values(), 1):
                push_wildly(wild, slot, number)
                scribblers.append(threading.Thread(target=scribble, args=(slot.path, over, chance)))
                scribblers[-1].start()
            modest.save(round_, bytes([round_]) * 1000)
            assert modest.wait_for(round_, "committed").name == f"step-{round_:09d}"
            over.set()
            for one in scribblers:
                one.join()
            scribblers.clear()
            over.clear()
            wild.close()
        modest.wait_for(8, "verified")
        modest.close()
    finally:
        over.set()
        daemon.kill()
    assert places.checkpoints()[-1] == "step-000000008"
    assert all(check(places.root / "default" / name).ok for name in places.checkpoints())
    assert "daemon.fault" not in (places.root / ".ckptd" / "daemon.log").read_text()


def push_wildly(client: BareClient, slot: Slot, number: int) -> None:
    generation = client.seal(slot, number, DATA)
    client.connection.send(
        wire.Push(
            id=number, client_id=client.client_id, slot=slot.name, generation=generation, snapshot=number
        )
    )


def ready(client: BareClient) -> BareClient:
    client.attach()
    client.reserve(len(DATA))
    return client


def test_a_slot_that_is_another_file_by_now_costs_nobody_else_anything(places: Places) -> None:
    daemon = DaemonProcess(places)
    secret = places.root.parent / "secret"
    secret.write_bytes(b"keep me" * 4096)
    try:
        daemon.ready()
        modest, wild = ready(BareClient(places.root)), ready(BareClient(places.root, "wild"))
        first, second = wild.slots.values()
        push_wildly(wild, first, 1)
        first.path.unlink()
        first.path.symlink_to(secret)
        second.path.unlink()
        os.mkfifo(second.path)
        wild.wait_for(1, "committed", "failed")
        modest.save(1, b"a" * 1000)
        modest.wait_for(1, "verified")
        wild.detach()
        daemon.kill()
        (again := DaemonProcess(places)).ready()
        again.kill()
        modest.close()
        wild.close()
    finally:
        daemon.kill()
    assert secret.read_bytes() == b"keep me" * 4096
    assert places.checkpoints() == ["step-000000001"]
