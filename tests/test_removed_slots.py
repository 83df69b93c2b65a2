"""Files of slots that somebody removes while they are in use: seen, said, and others are made; nothing sealed is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.errors import CheckpointWarning
from ckptd.link.staging import SlotSet
from ckptd.link.wire import SlotInfo
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_places import places
from daemon_parts import BareClient, DaemonProcess, Places, new_client_id, places_in, slot_size

__all__ = ["places"]

CLIENT, SIZE = new_client_id(), slot_size(10)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SlotPool]:
    made = SlotPool(tmp_path / "slots", rooms=lambda _: [])
    yield made
    made.close()


def make(pool: SlotPool, count: int) -> list[Slot]:
    slots = pool.make(CLIENT, "r", (1, 2), count, SIZE)
    pool.add(CLIENT, slots)
    return slots


def test_a_slot_is_in_place_while_its_own_file_has_its_name(pool: SlotPool) -> None:
    (slot,) = make(pool, 1)
    assert slot.in_place()
    slot.path.rename(slot.path.with_name("x"))
    assert not slot.in_place()
    slot.path.touch()
    assert not slot.in_place()
    assert Slot.anonymous("a", SIZE).in_place()


def test_a_client_fills_no_slot_whose_file_was_removed_and_counts_it(pool: SlotPool) -> None:
    gone, there = make(pool, 2)
    slots = SlotSet(CLIENT, "r")
    slots.update(str(pool.folder), [SlotInfo(name=one.name, bytes=one.capacity) for one in (gone, there)])
    gone.path.unlink()
    found = slots.find_free(SIZE)
    assert found is not None and found.name == there.name
    assert slots.removed == 1 and slots.must_grow(SIZE, 2)
    slots.close()


def test_the_daemon_says_once_which_slots_were_removed_and_makes_their_folder_anew(
    pool: SlotPool, caplog: pytest.LogCaptureFixture
) -> None:
    gone, _ = make(pool, 2)
    shutil.rmtree(pool.folder)
    for now in (0.0, 0.1, 9.0, 18.0):
        pool.look(now)
    assert caplog.text.count("slot.removed") == 2
    (new,) = make(pool, 1)
    assert new.in_place()
    gone.path.write_text("another's")
    pool.remove(gone)
    assert gone.path.exists(), "a file that isn't the slot's"


@contextlib.contextmanager
def running(made: Places) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(made).ready()
    try:
        yield daemon
    finally:
        daemon.kill()


def test_removed_slots_are_replaced_at_the_next_reservation_and_what_lies_in_one_is_written(
    tmp_path: Path,
) -> None:
    with places_in(tmp_path) as made, contextlib.ExitStack() as ending:
        daemon, client = ending.enter_context(running(made)), BareClient(made.root)
        ending.callback(client.close)
        client.attach()
        first, second = client.reserve(10)
        generation = client.seal(first, 1, b"a" * 10)
        for folder in made.shm.iterdir():
            shutil.rmtree(folder)
        (states,) = [run["slots"] for run in client.status()["runs"]]
        assert [slot["state"] for slot in states] == ["removed", "removed"]
        client.push(first, generation, 1)
        client.wait_for(1, "committed")
        anew = client.reserve(10)
        assert len(anew) == 2 and not {slot.name for slot in anew} & {first.name, second.name}
        client.save(2, b"b" * 10, anew[0])
        client.wait_for(2, "committed")
        client.stop()
        assert daemon.wait() == 0
        assert "slot.removed" in (made.root / ".ckptd" / "daemon.log").read_text()


@pytest.mark.slow
def test_a_job_is_told_that_its_slots_were_removed_and_its_next_snapshot_lies_in_files_again(
    places: Path,
) -> None:
    state = {"w": torch.zeros(4)}
    with ckptd.Client(places, run="r") as client:
        client.snapshot(1, state).wait("committed", timeout_s=30)
        for file in Path(os.environ["CKPTD_SHM_DIR"]).rglob("slot-*"):
            file.unlink()
        with pytest.warns(CheckpointWarning, match=r"somebody has removed \d slots? of this client"):
            client.snapshot(2, state)
        assert len(list(Path(os.environ["CKPTD_SHM_DIR"]).rglob("slot-*"))) == 2
        client.snapshot(3, state).wait("committed", timeout_s=30)
