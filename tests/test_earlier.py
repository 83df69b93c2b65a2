"""Which snapshot in a slot may be restored: only one that is surely what the disk would give later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import CheckpointWarning, TimedOut
from ckptd.limits import MAX_BASES
from ckptd.link import earlier
from ckptd.link.earlier import EarlierSlots
from ckptd.link.wire import Waiting, WaitingSnapshot
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import Slot, needed_bytes
from ckptd_places import places
from fake_daemon import FakeDaemon
from impatient import impatient
from snapshots import Writer, data_for, descriptor
from test_slot_reader import prove

__all__ = ["places"]

FIRST, SECOND, MINE = "a1" * 16, "b2" * 16, "c3" * 16


class Slots:
    """Slots in a folder, and what a daemon says of them."""

    def __init__(self, base: Path) -> None:
        self.root = Root.open(base / "root", create=True)
        self.writer = Writer(base / "root", client_id=FIRST)
        self.folder = base / "slots"
        self.folder.mkdir()
        self.told: list[WaitingSnapshot] | None = []
        self.asked = 0
        self.made: list[Slot] = []

    def seal(self, sequence: int, *, client: str = FIRST, proven: bool = True, **changes: Any) -> Slot:
        fields: dict[str, Any] = {"client_id": client, "snapshot": sequence} | changes
        d = descriptor(fields.pop("step", sequence), **fields)
        slot = Slot.create(
            self.folder / f"slot-{sequence}", needed_bytes(4096, 65536), client_id=client, run=d.run
        )
        slot.begin(client, d.run, d.snapshot)
        slot.data[:512] = data_for(d.step)
        slot.seal(encode(d), 512)
        slot.accept(sequence)
        if proven:
            prove(slot)
        self.made.append(slot)
        self.tell(client_id=client, snapshot=d.snapshot, sequence=sequence, slot=slot.name)
        return slot

    def tell(self, **said: Any) -> None:
        assert self.told is not None
        self.told.append(WaitingSnapshot(**said))

    def waiting(self) -> Sequence[WaitingSnapshot] | None:
        self.asked += 1
        return self.told

    def look(self, **how: Any) -> tuple[int, int, tuple[int, ...], str] | None:
        """Step, sequence, bases and folder of what was found."""
        with self.slots(**how) as slots:
            assert slots.look() == (slots.found is not None)
            self.coming = slots.coming
            if slots.found is None:
                return None
            accepted = slots.found.accepted
            return accepted.descriptor.step, accepted.sequence, slots.found.bases, slots.found.path.name

    def slots(self, **how: Any) -> EarlierSlots:
        return EarlierSlots(
            self.root, "default", MINE, waiting=self.waiting, slot_dir=lambda: self.folder, **how
        )


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = Slots(tmp_path)
    yield made
    for slot in made.made:
        slot.close()


def test_of_several_the_newest_is_found_with_what_it_went_on_from(slots: Slots) -> None:
    slots.writer.commit(1, snapshot=1)
    slots.seal(2, step=2)
    slots.seal(3, step=3)
    slots.seal(4, client=SECOND, snapshot=1, base_sequence=3, base_before=(2, 1), step=3)
    assert slots.look() == (3, 4, (3, 2, 1), "step-000000003.2")
    assert not slots.coming
    assert slots.look(step=3) is not None
    assert slots.look(step=2) is None


def test_an_empty_run_and_one_whose_trainer_restored_nothing(slots: Slots) -> None:
    slots.seal(1)
    assert slots.look() == (1, 1, (), "step-000000001")
    slots.seal(2, client=SECOND, snapshot=1)
    assert slots.look() == (2, 2, (1,), "step-000000002")


def test_nothing_is_found_where_the_daemon_says_nothing(slots: Slots) -> None:
    assert slots.look() is None
    slots.told = None
    assert slots.look() is None


def test_one_that_is_not_proven_is_coming_and_found_once_it_is(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "_ASK_EVERY_S", 0.0)
    slot = slots.seal(1, proven=False)
    with slots.slots() as looking:
        assert not looking.look() and looking.coming
        prove(slot)
        assert looking.look() and not looking.coming
        asked = slots.asked
        assert looking.look() and slots.asked == asked


def test_it_is_not_asked_for_more_often_than_five_times_a_second(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(earlier, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    slots.seal(1, proven=False)
    with slots.slots() as looking:
        for _ in range(50):
            looking.look()
            clock[0] += 0.02
    assert slots.asked == 5


OTHERS = {
    "the client's own": {"client_id": MINE},
    "in no file": {"slot": ""},
    "gone": {"slot": "slot-9"},
    "another snapshot": {"snapshot": 7},
    "another sequence": {"sequence": 7},
    "another client": {"client_id": SECOND},
    "outside of the folder": {"slot": "../slots/slot-2"},
    "the folder itself": {"slot": ".."},
}


@pytest.mark.parametrize("what", OTHERS)
def test_where_one_of_those_that_wait_can_not_be_seen_nothing_is_restored(slots: Slots, what: str) -> None:
    slots.seal(1)
    slots.seal(2)
    assert slots.look() is not None
    assert slots.told is not None
    honest = slots.told[1]
    said = {name: getattr(honest, name) for name in honest.__struct_fields__} | OTHERS[what]
    slots.told[1] = WaitingSnapshot(**said)
    assert slots.look() is None
    slots.told.reverse()  # nor an older one of them
    assert slots.look() is None


def test_where_one_is_the_clients_own_it_is_waited_for(slots: Slots) -> None:
    slots.seal(1)
    slots.seal(2, client=MINE, snapshot=1)
    assert slots.look() is None


def test_a_slot_of_another_run_is_not_this_runs(slots: Slots) -> None:
    slots.seal(1, run="other")
    assert slots.look() is None


def test_what_is_on_disk_already_or_newer_there_is_restored_from_there(slots: Slots) -> None:
    slots.seal(1)
    slots.writer.commit(1, snapshot=1)
    assert slots.look() is None
    slots.seal(2, client=SECOND)
    assert slots.look() is not None
    for step in (2, 3):
        slots.writer.commit(step, snapshot=step)
    assert slots.look() is None


def test_where_a_checkpoint_can_not_be_read_now_the_disk_is_waited_for(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.seal(1)
    real = earlier.read_series

    def fails(*_: object) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(earlier, "read_series", fails)
    with pytest.warns(CheckpointWarning, match="Input/output"):
        assert slots.look() is None
    monkeypatch.setattr(earlier, "read_series", real)
    assert slots.look() is not None


def test_a_damaged_descriptor_is_said_once_and_waited_for(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier, "_ASK_EVERY_S", 0.0)
    slot = slots.seal(1)
    slot.data[4096] ^= 1
    with slots.slots() as looking:
        with pytest.warns(CheckpointWarning, match="isn't what was sealed"):
            assert not looking.look()
        assert not looking.look() and not looking.coming


@pytest.mark.parametrize(
    "lie", [{"run": "other"}, {"client_id": SECOND}, {"snapshot": 9}, {"data_bytes": 520}], ids=lambda lie: next(iter(lie))
)  # fmt: skip
def test_a_descriptor_of_another_snapshot_than_its_header_names_is_refused(
    slots: Slots, lie: dict[str, Any]
) -> None:
    slot = slots.seal(1)
    slot.release()
    slot.begin(FIRST, "default", 1)
    d = replace(descriptor(1, client_id=FIRST, snapshot=1), **lie)
    slot.seal(encode(d), 512)
    slot.accept(1)
    prove(slot)
    with pytest.warns(CheckpointWarning, match="another snapshot"):
        assert slots.look() is None


def test_noise_for_a_descriptor_is_refused(slots: Slots) -> None:
    slot = slots.seal(1)
    for noise in (b"", b"\xc1", os.urandom(300)):
        slot.release()
        slot.begin(FIRST, "default", 1)
        slot.seal(noise, 512)
        slot.accept(1)
        prove(slot)
        with pytest.warns(CheckpointWarning, match="not a descriptor"):
            assert slots.look() is None


def test_more_than_can_be_told_in_a_descriptor_are_waited_for(slots: Slots) -> None:
    slots.seal(1)
    assert slots.told is not None
    slots.told = slots.told * (MAX_BASES + 1)
    assert slots.look() is None


@pytest.mark.slow
def test_a_daemon_that_does_not_say_what_waits_makes_no_wait_longer_than_it_was(places: Path) -> None:
    with FakeDaemon(Root.open(places, create=True)) as daemon:
        daemon.pending = 1
        daemon.deaf_to = {"Waiting", "Drain"}
        with ckptd.Client(places, daemon="attach") as client:
            began = time.monotonic()
            with pytest.raises(TimedOut), impatient(client, 0.2):
                client.restore({"n": 0})
            assert time.monotonic() - began < 40
            daemon.deaf_to = set()  # one of an earlier version: it answers something else
            assert client.restore({"n": 0}) is None
    assert daemon.named(Waiting)
