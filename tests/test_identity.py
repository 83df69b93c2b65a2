"""Clocks, mtimes, pids and paths: none of them decides which checkpoint is the latest, or whose a root is."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptd
from ckptd.disk.daemon_record import DaemonRecord
from ckptd.disk.lock import RootLock, holder
from ckptd.disk.rootdir import Root, own_start
from ckptd.errors import RootLocked
from daemon_parts import (
    BareClient,
    DaemonProcess,
    Places,
    descriptor_of,
    eventually,
    new_client_id,
    places_in,
)
from desk_daemon import DeskClient, DeskDaemon

TEN_YEARS_S = 10 * 365 * 24 * 3600.0


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@contextmanager
def desk(places: Places) -> Iterator[DeskDaemon]:
    daemon = DeskDaemon(places.root, keep_last=2, tell=lambda *_: None)
    try:
        yield daemon
    finally:
        daemon.close()


def save(daemon: DeskDaemon, client: DeskClient, number: int) -> None:
    slot, data = client.free(), bytes([number]) * 100
    assert slot is not None
    client.push(slot, client.seal(slot, descriptor_of(client.client_id, number, data), data), number)
    daemon.settle()


@pytest.mark.slow
def test_a_clock_that_jumps_ten_years_either_way_and_shuffled_mtimes_change_no_decision(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, chance = time.time, random.Random(1)
    number = 0
    for jump in (
        0.0,
        TEN_YEARS_S,
        -TEN_YEARS_S,
        0.0,
    ):  # each in a daemon of its own, and in mid-run of the last
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        with desk(places) as daemon:
            client = DeskClient(daemon, new_client_id(), os.getpid())
            for _ in range(2):
                number += 1
                save(daemon, client, number)
                monkeypatch.setattr(time, "time", lambda jump=jump: real() - 2 * jump)
                latest = ckptd.latest_valid(places.root, "default")
                assert latest is not None and latest.step == number
            client.leave()
        assert places.checkpoints()[-2:] == [f"step-{number - 1:09d}", f"step-{number:09d}"]
        for path in sorted(places.root.rglob("*")):
            moment = chance.uniform(0, 2 * real())
            os.utime(path, (moment, moment))
        found = ckptd.latest_valid(places.root, "default")
        assert found is not None and found.step == number
    assert len(places.checkpoints()) == 2  # retention kept the last two, whatever their times say


def test_a_record_that_names_a_living_process_with_another_start_is_nobodys(places: Places) -> None:
    root = Root.open(places.root, create=True)
    pid, started = os.getppid(), own_start()[1]
    record = DaemonRecord(
        endpoint="ipc:///x", pid=pid, pid_started=started + 1, daemon_id="d", started_at=1.0, version="0"
    )
    record.write(root)
    assert not record.alive()
    with RootLock(root):
        pass


def test_a_lock_that_names_a_living_process_with_another_start_names_nobody(places: Places) -> None:
    root = Root.open(places.root, create=True)
    pid, started = own_start()
    for said, named in ((started, pid), (started + 1, None)):
        (root.service_dir / "lock").write_text(f"{pid} {said}\n")
        assert holder(root) == named


def test_who_opens_a_root_whose_id_is_being_made_waits_for_it_and_takes_that_one(places: Places) -> None:
    root = Root.open(places.root, create=True)
    record = root.service_dir / "root.json"
    kept, opened = record.read_bytes(), list[str]()
    record.unlink()
    making = os.open(root.service_dir, os.O_RDONLY)
    fcntl.flock(making, fcntl.LOCK_EX)
    inode = os.fstat(making).st_ino
    thread = threading.Thread(target=lambda: opened.append(Root.open(places.root, create=False).id))
    thread.start()

    def waits() -> bool:
        locks = Path("/proc/locks").read_text().splitlines()
        return any("->" in line and f":{inode} " in line for line in locks)

    eventually(lambda: waits() or opened)
    record.write_bytes(kept)
    os.close(making)
    thread.join()
    assert opened == [root.id]


@pytest.mark.parametrize("way", ["link", "link above", "dots"])
def test_a_root_reached_by_two_paths_is_one_root_with_one_lock(places: Places, way: str) -> None:
    root = Root.open(places.root, create=True)
    if way == "link":
        other = places.root.parent / "other"
        other.symlink_to(places.root)
    elif way == "link above":
        above = places.root.parent / "above"
        above.symlink_to(places.root.parent)
        other = above / "root"
    else:
        other = places.root / ".." / "root"
    again = Root.open(other, create=False)
    assert (again.path, again.id) == (root.path, root.id)
    with RootLock(root), pytest.raises(RootLocked):
        RootLock(again).acquire()


def test_a_root_that_was_moved_while_stopped_goes_on_and_one_put_in_its_place_is_another(
    places: Places,
) -> None:
    with desk(places) as daemon:
        client = DeskClient(daemon, new_client_id(), os.getpid())
        save(daemon, client, 1)
        client.leave()
    first = Root.open(places.root, create=False)
    places.root.rename(places.root.parent / "moved")
    fresh = Root.open(places.root, create=True)
    assert fresh.id != first.id
    places.root = places.root.parent / "moved"
    assert Root.open(places.root, create=False).id == first.id
    with desk(places) as daemon:
        client = DeskClient(daemon, new_client_id(), os.getpid())
        save(daemon, client, 2)
        client.leave()
    assert places.checkpoints() == ["step-000000001", "step-000000002"]


_TRAINER = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from daemon_parts import BareClient
client = BareClient(Path(sys.argv[1]))
client.attach()
client.reserve(1000)
slot, other = client.slots.values()
client.seal(slot, 1, b"a" * 1000)
if os.fork() == 0:  # has the slots mapped, the sockets open, and outlives it
    time.sleep(600)
    os._exit(0)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_that_outlives_its_trainer_is_not_taken_for_it(places: Places) -> None:
    daemon = DaemonProcess(places)
    daemon.ready()
    script = [sys.executable, "-c", _TRAINER, str(places.root), str(Path(__file__).parent)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, start_new_session=True, text=True) as trainer:
        try:
            assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
            trainer.kill()
            trainer.wait()
            successor = BareClient(places.root)
            successor.attach()  # the run is free
            assert successor.drain() == 0
            assert places.checkpoints() == ["step-000000001"]
            successor.close()
            eventually(lambda: not places.slots())  # their names; the child has the memory until it ends
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
            daemon.kill()
