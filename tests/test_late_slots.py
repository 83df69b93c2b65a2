"""Slots that a start couldn't open: kept, tried again, and adopted unless their run has gone on."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import NoSpace
from ckptd.snapshot import slot_header
from ckptd.snapshot.slots import HEADER_BYTES, Slot, SlotState
from ckptd_daemon.core import recovery
from ckptd_daemon.core.late_slots import LOOK_AGAIN_S, LateSlots
from ckptd_daemon.core.slotpool import SlotPool
from daemon_parts import Places, descriptor_of, fill_slot, new_client_id, places_in, slot_size
from test_service import Desk


class Start:
    """A daemon's start on slots that an earlier one left, of which some can't be opened."""

    def __init__(self, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
        self.desk = Desk(places)
        self.before = SlotPool(self.desk.pool.folder, rooms=lambda _: [])
        self.closed: set[str] = set()
        self.clock = 0.0
        opened = Slot.open

        def open_unless_closed(path: Path) -> Slot:
            if path.name in self.closed:
                raise OSError(errno.EMFILE, "too many open files", str(path))
            return opened(path)

        monkeypatch.setattr(Slot, "open", open_unless_closed)

    def sealed(self, client_id: str, number: int, **fields: Any) -> Slot:
        (slot,) = self.before.make(client_id, fields.get("run", "default"), (0, 0), 1, slot_size(3))
        fill_slot(slot, descriptor_of(client_id, number, b"abc", **fields), b"abc")
        return slot

    def begin(self, *closed: Slot) -> int:
        self.closed = {slot.name for slot in closed}
        adopted = recovery.adopt(self.desk.disk, self.desk.clients, self.desk.pool)
        self.late = LateSlots(self.desk.disk, self.desk.clients, self.desk.pool, lambda: self.clock)
        self.desk.settle()
        return adopted

    def later(self) -> None:
        self.closed = set()
        self.clock += LOOK_AGAIN_S
        self.late.look()
        self.desk.settle()

    @property
    def written(self) -> list[int]:
        return [step for _, step, _, _ in self.desk.commit.written]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with places_in(tmp_path) as places:
        made = Start(places, monkeypatch)
        yield made
        made.desk.close()


A, B = new_client_id(), new_client_id()


@pytest.mark.parametrize("run", ["default", "of-nobody-else"])
def test_what_could_not_be_opened_at_the_start_is_written_once_it_can_be(start: Start, run: str) -> None:
    slot = start.sealed(A, 3, run=run)
    assert start.begin(slot) == 0 and slot.path.exists()
    start.late.look()
    assert start.written == []  # not before it is time
    start.later()
    start.later()  # the run had to be opened first
    assert start.written == [3] and not slot.path.exists()


def test_the_other_slots_are_adopted_at_the_start(start: Start) -> None:
    other = start.sealed(B, 1, run="other")
    assert start.begin(start.sealed(A, 3)) == 1
    assert start.written == [1] and not other.path.exists()


def test_a_newer_one_of_the_same_client_found_late_becomes_the_latest(start: Start) -> None:
    start.sealed(A, 2)
    newest = start.sealed(A, 3)
    newest.accept(1)
    start.begin(newest)
    start.later()
    assert [(step, sequence) for _, step, sequence, _ in start.desk.commit.written] == [(2, 1), (3, 2)]


def test_an_older_one_found_late_never_becomes_the_latest(start: Start) -> None:
    older = start.sealed(A, 2)
    start.sealed(A, 3)
    start.begin(older)
    start.later()
    assert start.written == [3] and not older.path.exists()


def test_an_older_one_is_written_after_all_when_the_newer_one_failed(start: Start) -> None:
    older, newer = start.sealed(A, 2), start.sealed(A, 3)
    newer.data[4096] ^= 1
    start.begin(older)
    start.later()
    assert start.written == [2]


def test_an_older_one_is_kept_while_nobody_knows_what_becomes_of_the_newer_one(start: Start) -> None:
    older = start.sealed(A, 2)
    start.sealed(A, 3)
    start.desk.commit.errors = [NoSpace("full")]
    start.begin(older)
    start.later()
    assert start.written == [] and older.header().state is SlotState.SEALED


def test_what_a_new_client_saved_meanwhile_counts_as_newer(start: Start) -> None:
    old = start.sealed(A, 7)
    old.accept(9)
    start.begin(old)
    start.desk.attach(B)
    start.desk.reserve(B)
    slot = start.desk.pool.of(B)[0]
    fill_slot(slot, descriptor_of(B, 1, b"abc"), b"abc")
    start.desk.clients.pipeline.accept(slot, slot.header())
    start.desk.settle()
    start.later()
    assert start.written == [1] and not old.path.exists()


def test_what_lies_late_with_nothing_sealed_is_removed(start: Start) -> None:
    slot = start.sealed(A, 3)
    slot.release()
    start.begin(slot)
    start.later()
    assert not slot.path.exists() and start.written == []


def test_a_slot_whose_header_cannot_be_changed_stops_neither_the_start_nor_the_others(start: Start) -> None:
    bad, good = start.sealed(A, 3), start.sealed(B, 4, run="other")
    with bad.path.open("r+b") as file:
        for place in (0, HEADER_BYTES // 2):
            file.seek(place)
            file.write(slot_header.pack(slot_header.MAX_NUMBER, bad.header()))
    assert start.begin() == 1
    assert start.written == [4] and bad.path.exists() and not good.path.exists()
    assert bad.header().state is SlotState.SEALED
