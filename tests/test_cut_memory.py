"""A slot that is made shorter while it is mapped: whoever reads it hears of it, and lives."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ckptd.disk.rootdir import Root
from ckptd.errors import NoSpace, ProtocolError
from ckptd.link import wire
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.cut_memory import surviving_cuts
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.series.settings_file import Settings
from daemon_parts import BareClient, DaemonProcess, Places, descriptor_of, fill_slot, new_client_id, places_in

DATA = bytes(range(1, 251)) * 4000


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot.create(tmp_path / "slot", 2**20 + 8192)
    fill_slot(made, descriptor_of(new_client_id(), 1, DATA), DATA)
    with surviving_cuts():
        yield made
    made.close()


@pytest.mark.parametrize("size", [0, 4096])
def test_a_slot_that_was_cut_is_refused_by_whoever_reads_it(slot: Slot, size: int) -> None:
    os.truncate(slot.path, size)
    with pytest.raises(ProtocolError):
        slot.descriptor()
    with pytest.raises(ProtocolError, match="cut short"):
        slot.refuse_cut()
    if size == 0:
        with pytest.raises(ProtocolError, match="no whole header"):
            slot.header()


def test_what_was_read_before_somebody_made_the_file_longer_again_is_not_believed_either(slot: Slot) -> None:
    size = slot.capacity
    os.truncate(slot.path, size // 2)
    assert bytes(slot.data[-4096:]) == bytes(4096)
    os.truncate(slot.path, size)
    with pytest.raises(ProtocolError, match="cut short"):
        slot.check(slot.data[: len(DATA)], threads=1)


def test_a_write_that_failed_when_its_slot_had_been_cut_fails_for_good(slot: Slot, tmp_path: Path) -> None:
    def commit(*_: object, **_how: object) -> NoReturn:
        os.truncate(slot.path, 8192)
        raise NoSpace("the disk is full")  # alone it would be tried again

    disk = Disk(Root.open(tmp_path / "root", create=True), Settings(), commit=commit)
    with pytest.raises(ProtocolError, match="cut short"):
        disk.write(slot, 1, lambda _: None)


def test_a_cut_in_the_middle_of_a_hash_in_another_thread_ends_nothing(slot: Slot) -> None:
    hashed: list[str] = []
    over = threading.Event()

    def keep_hashing() -> None:
        while not over.is_set():
            hashed.append(hashlib.sha256(slot.data).hexdigest())  # without the GIL

    thread = threading.Thread(target=keep_hashing)
    thread.start()
    while not hashed:
        pass
    os.truncate(slot.path, 8192)
    before = len(hashed)
    while len(hashed) < before + 2:
        bytes(slot.data[-100:])  # with it
    over.set()
    thread.join()
    assert hashed[0] != hashed[-1]


def test_a_bus_error_anywhere_else_ends_the_process_as_ever(tmp_path: Path) -> None:
    script = """if True:
        import mmap, os, sys
        from ckptd_daemon.core.cut_memory import surviving_cuts
        with open(sys.argv[1], "w+b") as file, surviving_cuts():
            file.truncate(8192)
            view = mmap.mmap(file.fileno(), 8192)
            file.truncate(0)
            view[0]
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "f")], check=False)
    assert done.returncode == -signal.SIGBUS


@pytest.mark.slow
@pytest.mark.parametrize("pushed_first", [True, False])
def test_a_client_that_cuts_its_slot_short_costs_its_snapshot_and_nobody_elses(
    places: Places, pushed_first: bool
) -> None:
    daemon = DaemonProcess(places)
    try:
        daemon.ready()
        modest, cutting = BareClient(places.root), BareClient(places.root, "cutting")
        for client in (modest, cutting):
            client.attach()
            client.reserve(len(DATA))
        for number, (name, slot) in enumerate(cutting.slots.items(), 1):
            generation = cutting.seal(slot, number, DATA)
            push = wire.Push(
                id=number, client_id=cutting.client_id, slot=name, generation=generation, snapshot=number
            )
            if pushed_first:  # the daemon may be writing it, or may have written it
                cutting.connection.send(push)
            os.truncate(slot.path, 8192 if number == 1 else 0)
            if not pushed_first:
                cutting.connection.send(push)
            modest.save(number, bytes([number]) * 1000)
            assert modest.wait_for(number, "committed").name == f"step-{number:09d}"
        assert modest.drain() <= 2
        modest.close()
        cutting.close()
    finally:
        daemon.kill()
    log = (places.root / ".ckptd" / "daemon.log").read_text()
    if not pushed_first:
        assert "snapshot.failed run=cutting" in log
        assert places.checkpoints("cutting") == []
