"""A root that is moved, removed or replaced while it is used: nothing is written where it was, and nothing is lost."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.commit import commit_snapshot
from ckptd.disk.lock import RootLock
from ckptd.disk.root_place import RootPlace
from ckptd.disk.rootdir import Root
from ckptd.errors import CheckpointWarning, OutcomeUnknown, RootMoved
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_daemon.core.disk import Disk, Written
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.series.settings_file import Settings
from ckptd_places import daemon_of, end_daemon, places
from daemon_parts import descriptor_of, fill_slot, new_client_id, slot_size
from fake_daemon import wait_until

__all__ = ["places"]


def move(root: Path) -> None:
    root.rename(root.with_name("moved"))


def replace(root: Path) -> None:
    move(root)
    shutil.copytree(root.with_name("moved"), root)


def remove(root: Path) -> None:
    """Taken away at once: a daemon puts its files back while a tree is removed one by one."""
    gone = root.with_name("gone")
    root.rename(gone)
    wait_until(lambda: shutil.rmtree(gone, ignore_errors=True) is None and not gone.exists())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def seen_at(place: RootPlace) -> str:
    with pytest.raises(RootMoved) as caught:
        place.check()
    return str(caught.value)


def test_a_root_is_in_place_until_it_is_moved_and_again_when_it_is_back(folder: Path) -> None:
    place = RootPlace(folder)
    place.check()
    move(folder)
    said = seen_at(place)
    assert f"it is {folder.with_name('moved')} now; nothing is at its path" in said and not place.removed
    folder.with_name("moved").rename(folder)
    place.check()
    place.close()
    place.close()


def test_another_folder_at_the_roots_path_is_not_it(folder: Path) -> None:
    place = RootPlace(folder)
    replace(folder)
    assert "another folder is at its path" in seen_at(place) and not place.removed
    place.close()


def test_a_removed_root_is_told_from_a_moved_one_and_from_one_made_anew(folder: Path) -> None:
    place = RootPlace(folder)
    folder.rmdir()
    assert "the root was removed" in seen_at(place) and place.removed
    folder.mkdir()
    assert "another folder is at its path" in seen_at(place) and place.removed
    place.close()


class Bench:
    """A daemon's disk with one slot that is sealed, under a lock; a commit does `beside` when it is over, or before."""

    def __init__(self, lock: RootLock, shm: Path) -> None:
        self.root, self.lost = lock.root, 0
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.disk = Disk(self.root, Settings(), commit=self.commit, in_place=lock.place.check)
        self.disk.root_lost = self.lose
        self.disk.open_run("r")
        self.pool = SlotPool(shm, rooms=lambda _: [])

    def commit(self, *args: Any, **options: Any) -> Any:
        self.before()
        done = commit_snapshot(*args, **options)
        self.after()
        return done

    def lose(self, error: RootMoved) -> None:
        self.lost += 1

    def sealed(self) -> Slot:
        client, data = new_client_id(), b"abc"
        (slot,) = self.pool.make(client, "r", (1, 1), 1, slot_size(len(data)))
        fill_slot(slot, descriptor_of(client, 1, data, run="r"), data)
        return slot

    def write(self, slot: Slot) -> object:
        return self.disk.write(slot, 1, lambda _: None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o700)
    with RootLock(Root.open(tmp_path / "root", create=True)) as lock:
        yield Bench(lock, shm)


def test_nothing_is_begun_at_a_path_where_the_root_was(bench: Bench) -> None:
    slot, path = bench.sealed(), bench.root.path
    move(path)
    with pytest.raises(RootMoved):
        bench.write(slot)
    bench.disk.worker.deliver()
    assert bench.lost == 1 and not path.exists()
    assert slot.header().state is SlotState.SEALED
    path.mkdir()
    with pytest.raises(RootMoved):
        bench.disk.keep_up("r")
    assert not list(path.iterdir())


def test_what_fails_because_the_root_is_moved_under_a_write_stays_in_its_slot(bench: Bench) -> None:
    slot, path = bench.sealed(), bench.root.path
    bench.before = lambda: move(path)
    with pytest.raises(RootMoved):
        bench.write(slot)
    assert slot.header().state is SlotState.WRITING and not path.exists()


def test_a_commit_at_a_path_that_isnt_the_roots_any_more_is_not_acknowledged(bench: Bench) -> None:
    slot, path = bench.sealed(), bench.root.path
    bench.after = lambda: replace(path)
    with pytest.raises(RootMoved):
        bench.write(slot)
    assert slot.header().state is SlotState.WRITING


def test_where_the_root_stays_the_slot_is_freed(bench: Bench) -> None:
    slot = bench.sealed()
    assert isinstance(bench.write(slot), Written) and slot.header().state is SlotState.FREE


def test_without_a_daemon_nothing_is_written_where_the_root_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, root = {"w": torch.zeros(4)}, tmp_path / "root"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with ckptd.Client(root, daemon="off") as client:
            assert client.snapshot(1, state).state == "committed"
            move(root)
            ticket = client.snapshot(2, state)
            assert ticket.state == "failed" and isinstance(ticket.error, RootMoved) and not root.exists()
            root.with_name("moved").rename(root)
            assert client.snapshot(3, state).state == "committed"

            def commit_and_move(*args: Any, **options: Any) -> Any:
                done = commit_snapshot(*args, **options)
                move(root)
                return done

            monkeypatch.setattr("ckptd.link.inline_writer.commit_snapshot", commit_and_move)
            ticket = client.snapshot(4, state)
            assert ticket.state == "unknown" and isinstance(ticket.error, OutcomeUnknown)


def client_of(places: Path) -> ckptd.Client:
    return ckptd.Client(places, run="r", busy_timeout_s=30, start_timeout_s=30, close_timeout_s=30)


def has_come(ticket: ckptd.Ticket) -> bool:
    with contextlib.suppress(RootMoved):  # it looks once in a second
        ticket.wait("committed", timeout_s=30)
    return ticket.has_reached("committed")


@pytest.mark.slow
def test_a_job_whose_root_was_moved_is_told_and_what_it_saved_is_written_where_the_root_is(
    places: Path,
) -> None:
    moved, state = places.with_name("moved"), {"w": torch.zeros(4)}
    client = client_of(places)
    client.snapshot(1, state).wait("committed", timeout_s=30)
    daemon = daemon_of(places)
    assert daemon is not None
    places.rename(moved)
    ticket = client.snapshot(2, state)
    wait_until(lambda: not daemon.alive())
    with pytest.raises(RootMoved, match="the root was moved"):
        ticket.wait("committed", timeout_s=30)
    with pytest.warns(CheckpointWarning, match="step 2 may be saved or not"):
        client.close()
    assert not places.exists()
    try:
        with ckptd.Client(moved, run="r") as after:
            resumed = after.restore({"w": torch.ones(4)})
            assert resumed is not None and resumed.step == 2
    finally:
        end_daemon(moved)
    assert (moved / "r" / "step-000000002").is_dir()


@pytest.mark.slow
def test_a_job_whose_root_was_removed_goes_on_in_a_folder_that_is_made_for_it(places: Path) -> None:
    state = {"w": torch.zeros(4)}
    with client_of(places) as client:
        client.snapshot(1, state).wait("committed", timeout_s=30)
        daemon = daemon_of(places)
        assert daemon is not None
        remove(places)
        ticket = client.snapshot(2, state)
        wait_until(lambda: not daemon.alive())
        with pytest.raises(RootMoved, match="the root was removed"):
            ticket.wait("committed", timeout_s=30)
        assert not places.exists()
        places.mkdir()
        wait_until(lambda: has_come(ticket))
        client.snapshot(3, state).wait("verified", timeout_s=30)
        latest = client.latest()
        assert latest is not None and latest.step == 3
