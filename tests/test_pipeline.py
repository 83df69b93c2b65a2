from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.disk import own_leftovers
from ckptd.disk.rootdir import Root
from ckptd.errors import (
    CheckpointGone,
    CorruptCheckpoint,
    NoSpace,
    OutcomeUnknown,
    ProtocolError,
    SaveFailed,
)
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.pipeline import MOST_ROOM_WAITS, ROOM_WAIT_S, TIDY_EVERY_S, Pipeline
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.snapshots import REMEMBERED, Snapshot
from ckptd_daemon.series.settings_file import Settings
from daemon_parts import Places, descriptor_of, fill_slot, new_client_id, places_in, slot_size
from fake_catalogue import FakeCatalogue, FakeCommit


class Rig:
    """A pipeline on a disk whose catalogue and writer are fakes."""

    def __init__(self, places: Places) -> None:
        self.events: list[str] = []
        self.commit = FakeCommit(self.events)
        self.catalogues: dict[str, FakeCatalogue] = {}
        self.root = Root.open(places.root, create=True)
        self.disk = Disk(self.root, Settings(), commit=self.commit, catalogue=self._catalogue)  # type: ignore[arg-type]
        self.pool = SlotPool(self.root.slot_dir(), rooms=lambda _: [])
        self.clock = 100.0
        self.pipeline = Pipeline(self.disk, self.pool, self, lambda: self.clock)
        self.connected: set[str] = set()
        self.told: list[tuple[str, int, str, bool]] = []  #: client, snapshot, word, slot handed back
        self.verify_asked: list[tuple[str, str]] = []
        self.open("default")
        self.disk.worker.start()

    def _catalogue(self, root: Root, run: str) -> Any:
        return self.catalogues.setdefault(run, FakeCatalogue(run, self.events))

    def open(self, run: str) -> None:
        self.pipeline.opened(run, self.disk.open_run(run))

    # the listener
    def snapshot_changed(self, snapshot: Snapshot, freed: Slot | None) -> None:
        self.told.append((snapshot.client_id, snapshot.number, snapshot.word, freed is not None))
        if freed is not None:
            self.events.append(
                f"told {snapshot.number} {snapshot.word} slot {freed.header().state.name.lower()}"
            )

    def attached(self, client_id: str) -> bool:
        return client_id in self.connected

    def to_verify(self, run: str, name: str) -> None:
        self.verify_asked.append((run, name))

    # what a test does
    def sealed(self, client_id: str, number: int, data: bytes = b"abc", **fields: Any) -> Slot:
        (slot,) = self.pool.make(client_id, fields.get("run", "default"), (1, 1), 1, slot_size(len(data)))
        self.pool.add(client_id, [slot])
        fill_slot(slot, descriptor_of(client_id, number, data, **fields), data)
        return slot

    def accept(self, slot: Slot) -> Snapshot:
        return self.pipeline.accept(slot, slot.header())

    def settle(self) -> None:
        """Deliver until the disk has nothing left to do, not even what came of what it did."""
        for _ in range(2):
            idle: list[None] = []
            self.disk.worker.submit(lambda: None, lambda _, idle=idle: idle.append(None))
            while not idle:
                select.select([self.disk.worker], [], [], 60)
                self.disk.worker.deliver()

    def words(self, number: int) -> list[str]:
        return [word for _, snapshot, word, _ in self.told if snapshot == number]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with places_in(tmp_path) as places:
        made = Rig(places)
        yield made
        made.disk.worker.stop()
        for slot in made.pool:
            made.pool.remove(slot)
        made.pool.close()


CLIENT = new_client_id()


def report_on(name: str, **fields: Any) -> Any:
    return SimpleNamespace(
        name=name, path=Path(name), faults=("bit flipped",), bytes=1, how="direct", **fields
    )


def test_the_slot_is_free_before_the_acknowledgement_and_the_index_comes_after(rig: Rig) -> None:
    snapshot = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    rig.settle()
    assert rig.events[:4] == ["committed 1", "told 1 committed slot free", "added step-000000001", "index"]
    assert rig.words(1) == ["committed"]
    assert rig.verify_asked == [("default", "step-000000001")]
    assert snapshot.state is State.COMMITTED


def test_what_was_committed_is_in_the_catalogue_before_the_next_one_gets_its_place(rig: Rig) -> None:
    with rig.commit.held:
        for number in (1, 2):
            rig.accept(rig.sealed(CLIENT, number))
    rig.settle()
    first = ["committed 1", "added step-000000001", "committed 2"]
    assert [event for event in rig.events if event in first] == first


def test_the_sequence_is_in_the_header_from_the_acceptance_on(rig: Rig) -> None:
    slot = rig.sealed(CLIENT, 1)
    snapshot = rig.accept(slot)
    assert slot.header().sequence == snapshot.sequence == 1
    assert rig.accept(rig.sealed(CLIENT, 2)).sequence == 2


def test_what_is_written_has_the_bytes_and_the_sequence_of_the_slot_in_order_of_acceptance(rig: Rig) -> None:
    for number in (1, 2, 3):
        rig.accept(rig.sealed(CLIENT, number, bytes([number]) * number))
    rig.settle()
    assert rig.commit.written == [("default", n, n, bytes([n]) * n) for n in (1, 2, 3)]


def test_accepting_a_snapshot_twice_writes_it_once(rig: Rig) -> None:
    slot = rig.sealed(CLIENT, 1)
    assert rig.accept(slot) is rig.accept(slot)
    rig.settle()
    assert len(rig.commit.written) == 1


def test_a_snapshot_that_was_committed_before_a_crash_is_not_written_again(rig: Rig) -> None:
    rig.catalogues["default"].names[CLIENT, 1] = "step-000000001"
    slot = rig.sealed(CLIENT, 1)
    slot.mark_writing(7)
    snapshot = rig.pipeline.accept(slot, slot.header(), sequence=7)
    rig.settle()
    assert rig.commit.written == []
    assert (snapshot.state, snapshot.name) == (State.COMMITTED, "step-000000001")
    assert slot.header().state is SlotState.FREE


def test_an_adopted_sequence_is_kept_and_the_next_ones_are_higher(rig: Rig) -> None:
    old = rig.sealed(CLIENT, 4)
    assert rig.pipeline.accept(old, old.header(), sequence=41).sequence == 41
    assert rig.accept(rig.sealed(CLIENT, 5)).sequence == 42


def test_a_header_with_an_absurd_sequence_does_not_set_the_counter(rig: Rig) -> None:
    old = rig.sealed(CLIENT, 4)
    assert rig.pipeline.accept(old, old.header(), sequence=2**63).sequence == 1


def test_that_a_write_has_begun_is_told_while_it_lasts(rig: Rig) -> None:
    with rig.commit.held:
        rig.accept(rig.sealed(CLIENT, 1))
        assert rig.commit.begun.wait(60)
        rig.disk.worker.deliver()
        assert rig.words(1) == ["writing"]
    rig.settle()
    assert rig.words(1) == ["writing", "committed"]


@pytest.mark.parametrize(
    "error", [NoSpace("full"), SaveFailed("I/O error"), OSError(5, "I/O"), MemoryError()]
)
def test_a_failure_is_told_to_a_live_client_and_its_slot_is_free_again(rig: Rig, error: Exception) -> None:
    rig.connected.add(CLIENT)
    rig.commit.errors = [error]
    slot = rig.sealed(CLIENT, 1)
    snapshot = rig.accept(slot)
    rig.settle()
    assert snapshot.state is State.FAILED and isinstance(snapshot.error, (NoSpace, SaveFailed))
    assert rig.words(1) == ["failed"]
    assert slot.header().state is SlotState.FREE
    assert not rig.pipeline.busy()


def test_a_failure_with_nobody_to_tell_keeps_the_slot_and_tries_again_with_growing_pauses(rig: Rig) -> None:
    rig.commit.errors = [NoSpace("full")] * 6
    slot = rig.sealed(CLIENT, 1)
    snapshot = rig.accept(slot)
    rig.settle()
    pauses = []
    while snapshot.state is State.STAGED:
        assert slot.header().state is SlotState.WRITING
        assert snapshot.retry_at is not None and not rig.pipeline.busy()
        pauses.append(snapshot.retry_at - rig.clock)
        rig.clock = snapshot.retry_at - 0.1
        rig.pipeline.retry()
        assert not rig.pipeline.busy()
        rig.clock += 0.2
        rig.pipeline.retry()
        rig.settle()
    assert [round(pause) for pause in pauses] == [5, 10, 20, 40, 60, 60]
    assert snapshot.state is State.COMMITTED and snapshot.error is None
    assert len(rig.commit.written) == 1


def test_what_was_put_off_is_given_up_once_a_newer_one_of_its_run_is_committed(rig: Rig) -> None:
    rig.open("other")
    rig.commit.errors = [NoSpace("full"), NoSpace("full"), None]
    old, elsewhere = rig.sealed(CLIENT, 1), rig.sealed(CLIENT, 2, run="other")
    put_off, kept = rig.accept(old), rig.accept(elsewhere)
    rig.accept(rig.sealed(new_client_id(), 1, step=9))
    rig.settle()
    assert put_off.state is State.SUPERSEDED and old.header().state is SlotState.FREE
    assert kept.state is State.STAGED and elsewhere.header().state is SlotState.WRITING


def test_a_damaged_descriptor_fails_at_once_even_with_nobody_to_tell(rig: Rig) -> None:
    slot = rig.sealed(CLIENT, 1)
    slot.data[4096] ^= 1
    snapshot = rig.accept(slot)
    rig.settle()
    assert snapshot.state is State.FAILED and slot.header().state is SlotState.FREE


def test_a_header_destroyed_during_the_write_does_not_make_a_failure_of_a_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ProtocolError("no whole header")

    slot = rig.sealed(CLIENT, 1)
    monkeypatch.setattr(slot, "release", fails)
    snapshot = rig.accept(slot)
    rig.settle()
    assert snapshot.state is State.COMMITTED and rig.words(1) == ["committed"]
    rig.settle()
    assert "added step-000000001" in rig.events


def test_a_descriptor_of_another_snapshot_is_refused(rig: Rig) -> None:
    (slot,) = rig.pool.make(CLIENT, "default", (1, 1), 1, slot_size(3))
    rig.pool.add(CLIENT, [slot])
    slot.begin(CLIENT, "default", 2)
    from ckptd.snapshot.descriptor_codec import encode

    slot.seal(encode(descriptor_of(CLIENT, 1, b"abc")), 3)
    snapshot = rig.accept(slot)
    rig.settle()
    assert snapshot.state is State.FAILED and rig.commit.written == []


def test_an_unknown_outcome_is_told_as_unknown_after_the_disk_was_looked_at(rig: Rig) -> None:
    rig.connected.add(CLIENT)
    rig.commit.errors = [OutcomeUnknown("fsync failed")]
    rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    assert rig.words(1) == ["unknown"]
    assert "rescan" in rig.events


def test_a_verdict_reaches_the_client_and_only_then_may_anything_be_removed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    assert "retention" not in rig.events
    told_by_then: list[list[str]] = []
    monkeypatch.setattr(
        rig.catalogues["default"], "apply_retention", lambda _: told_by_then.append(rig.words(1)) or []
    )
    rig.pipeline.report("default", report_on("step-000000001"))
    rig.settle()
    assert snapshot.state is State.VERIFIED
    assert told_by_then == [["committed", "verified"]]  # whoever waits for it doesn't wait for that too


@pytest.mark.parametrize(("verdict", "kind"), [("corrupt", CorruptCheckpoint), ("gone", CheckpointGone)])
def test_a_bad_verdict_reaches_the_client_and_nothing_is_removed(rig: Rig, verdict: str, kind: type) -> None:
    snapshot = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    rig.catalogues["default"].verdict = verdict
    rig.pipeline.report("default", report_on("step-000000001"))
    rig.settle()
    assert isinstance(snapshot.error, kind)
    assert rig.words(1)[-1] == "corrupt"
    assert "retention" not in rig.events


def test_draining_waits_for_what_was_accepted_and_not_for_later_ones(rig: Rig) -> None:
    answers: list[int] = []
    rig.accept(rig.sealed(CLIENT, 1))
    rig.pipeline.when_settled(None, verified=False, reply=answers.append)
    assert answers == []
    rig.settle()
    assert answers == [0]
    rig.pipeline.when_settled(None, verified=True, reply=answers.append)
    rig.accept(rig.sealed(CLIENT, 2))
    rig.settle()
    assert answers == [0]
    rig.pipeline.report("default", report_on("step-000000001"))
    rig.settle()
    assert answers == [0, 0]


def test_draining_counts_what_failed_and_does_not_wait_for_what_was_put_off(rig: Rig) -> None:
    answers: list[int] = []
    rig.commit.errors = [NoSpace("full")]
    rig.accept(rig.sealed(CLIENT, 1))
    rig.pipeline.when_settled("default", verified=False, reply=answers.append)
    rig.settle()
    rig.pipeline.when_settled("default", verified=False, reply=answers.append)
    assert answers == [1, 1]


def test_written_snapshots_are_forgotten_in_the_end_and_unwritten_ones_never(rig: Rig) -> None:
    rig.commit.errors = [NoSpace("full")]
    put_off = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    ledger = rig.pipeline.books["default"].ledger
    for number in range(2, REMEMBERED + 50):
        ledger.add(Snapshot("default", CLIENT, number, number, None, State.FAILED))
    assert ledger.get(CLIENT, 1) is put_off
    assert ledger.get(CLIENT, 2) is None
    assert len(list(ledger)) == REMEMBERED + 1


def test_a_report_that_could_not_be_acted_on_is_asked_for_again(rig: Rig) -> None:
    snapshot = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    asked = list(rig.verify_asked)

    def broken(report: Any) -> str:
        raise OSError(5, "I/O error")

    rig.catalogues["default"].apply_report = broken  # type: ignore[method-assign]
    rig.pipeline.report("default", report_on("step-000000001"))
    rig.settle()
    rig.pipeline.retry()
    assert rig.verify_asked == asked and snapshot.state is State.COMMITTED
    rig.clock += 100
    rig.pipeline.retry()
    rig.pipeline.retry()
    assert rig.verify_asked == [*asked, *asked]


def test_a_full_disk_is_tried_again_once_retention_has_had_its_turn(rig: Rig) -> None:
    rig.connected.add(CLIENT)
    answers: list[int] = []
    rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    rig.commit.errors = [NoSpace("full")]
    slot = rig.sealed(CLIENT, 2)
    snapshot = rig.accept(slot)
    rig.pipeline.when_settled(None, verified=False, reply=answers.append)
    rig.settle()
    rig.pipeline.retry()
    assert slot.header().state is SlotState.WRITING and rig.words(2) == []
    assert rig.pipeline.busy() and answers == []  # it is not as good as failed
    rig.pipeline.report("default", report_on("step-000000001"))
    rig.settle()
    rig.pipeline.retry()
    rig.settle()
    assert snapshot.state is State.COMMITTED and answers == [0]
    assert rig.events.index("retention") < rig.events.index("committed 2")


def test_a_disk_that_stays_full_is_told_after_two_more_tries(rig: Rig) -> None:
    rig.connected.add(CLIENT)
    rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    rig.commit.errors = [NoSpace("full")] * 9
    snapshot = rig.accept(rig.sealed(CLIENT, 2))
    rig.settle()
    for _ in range(MOST_ROOM_WAITS):
        assert snapshot.state is State.STAGED
        rig.clock += ROOM_WAIT_S
        rig.pipeline.retry()
        rig.settle()
    assert snapshot.state is State.FAILED and rig.words(2)[-1] == "failed"
    assert rig.events.count("failed 2") == 1 + MOST_ROOM_WAITS
    assert isinstance(snapshot.error, NoSpace) and not rig.pipeline.busy()


def test_what_a_failed_write_left_is_removed_in_time_and_by_the_disks_thread(rig: Rig) -> None:
    left = rig.root.path / "default" / ".tmp-1-of-mine"
    left.mkdir(parents=True)
    own_leftovers.note(left)
    rig.pipeline.retry()
    rig.settle()
    assert left.exists()  # not at every turn
    rig.clock += TIDY_EVERY_S
    rig.pipeline.retry()
    rig.settle()
    assert not left.exists()


# --- giving way -------------------------------------------------------------------------------------


def test_what_is_queued_gives_way_and_is_never_written(rig: Rig) -> None:
    answers: list[int] = []
    with rig.commit.held:
        first, second = rig.accept(rig.sealed(CLIENT, 1)), rig.accept(slot := rig.sealed(CLIENT, 2))
        assert rig.commit.begun.wait(60)
        rig.pipeline.when_settled(None, verified=False, reply=answers.append)
        assert not rig.pipeline.give_way(first, 11)
        assert rig.pipeline.give_way(second, 12)
        assert slot.header().state is SlotState.FREE and not rig.pipeline.give_way(second, 12)
    rig.settle()
    assert [number for _, number, _, _ in rig.commit.written] == [1]
    assert rig.words(2) == ["superseded"] and second.step == 12 and answers == [0]
    book = rig.pipeline.books["default"]
    assert (book.superseded, book.last_superseded, book.failed) == (1, second, 0)
    assert first.state is State.COMMITTED


def test_what_is_being_written_never_gives_way_however_the_race_ends(rig: Rig) -> None:
    for number in range(1, 201):
        rig.commit.begun.clear()
        snapshot = rig.accept(slot := rig.sealed(CLIENT, number))
        if number % 2:
            rig.commit.begun.wait(0.001)
        gave_way = rig.pipeline.give_way(snapshot)
        assert gave_way == (snapshot.state is State.SUPERSEDED)
        rig.settle()
        written = number in {one for _, one, _, _ in rig.commit.written}
        assert written != gave_way
        assert snapshot.state is (State.SUPERSEDED if gave_way else State.COMMITTED)
        rig.pool.remove(slot)


def test_what_was_put_off_gives_way_with_the_error_it_had(rig: Rig) -> None:
    rig.commit.errors = [NoSpace("full")]
    snapshot = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    assert snapshot.retry_at is not None
    assert rig.pipeline.give_way(snapshot)
    assert snapshot.state is State.SUPERSEDED and isinstance(snapshot.error, NoSpace)
    rig.clock += 1000
    rig.pipeline.retry()
    rig.settle()
    assert rig.commit.written == []


def test_what_was_asked_for_too_late_does_not_give_way(rig: Rig) -> None:
    with rig.commit.held:
        rig.accept(rig.sealed(CLIENT, 1))
        second = rig.accept(rig.sealed(CLIENT, 2))
        assert rig.commit.begun.wait(60)
        for until in (rig.clock - 0.1, float("nan"), float("-inf")):
            assert not rig.pipeline.give_way(second, until=until)
    rig.settle()
    assert [number for _, number, _, _ in rig.commit.written] == [1, 2]


def test_a_snapshot_that_comes_after_a_newer_one_of_its_client_is_superseded_and_another_clients_is_not(
    rig: Rig,
) -> None:
    newer, older = rig.accept(rig.sealed(CLIENT, 2)), rig.sealed(CLIENT, 1)
    late, other = rig.accept(older), rig.accept(rig.sealed(new_client_id(), 1))
    assert (late.state, older.header().state) == (State.SUPERSEDED, SlotState.FREE)
    assert rig.told == [(CLIENT, 1, "superseded", True)]
    assert rig.pipeline.find("default", CLIENT, 1) is late
    rig.settle()
    assert rig.commit.written == [
        ("default", 2, newer.sequence, b"abc"), ("default", 1, other.sequence, b"abc")
    ]  # fmt: skip
    assert rig.accept(rig.sealed(CLIENT, 1)) is late
    assert rig.pipeline.books["default"].superseded == 1


def test_an_older_snapshot_is_written_after_all_where_the_newer_one_has_failed(rig: Rig) -> None:
    rig.connected.add(CLIENT)
    rig.commit.errors = [SaveFailed("no")]
    failed = rig.accept(rig.sealed(CLIENT, 2))
    rig.settle()
    older = rig.accept(rig.sealed(CLIENT, 1))
    rig.settle()
    assert (failed.state, older.state) == (State.FAILED, State.COMMITTED)


def test_an_older_snapshot_is_not_written_over_a_newer_one_that_an_earlier_daemon_committed(rig: Rig) -> None:
    catalogue = rig.catalogues["default"]
    catalogue.names[CLIENT, 2], catalogue.sequences["step-000000002"] = "step-000000002", 5
    rig.pipeline.books["default"].next_sequence = 6
    slot = rig.sealed(CLIENT, 1)
    late = rig.accept(slot)
    rig.settle()
    assert (late.state, late.step, slot.header().state) == (State.SUPERSEDED, 1, SlotState.FREE)
    assert rig.commit.written == [] and rig.words(1) == ["superseded"]


def test_an_older_snapshot_with_the_lower_sequence_that_it_was_given_keeps_its_place(rig: Rig) -> None:
    newer, older = rig.sealed(CLIENT, 2), rig.sealed(CLIENT, 1)
    rig.pipeline.accept(newer, newer.header(), sequence=7)
    rig.pipeline.accept(older, older.header(), sequence=4)
    rig.settle()
    assert [(step, sequence) for _, step, sequence, _ in rig.commit.written] == [(2, 7), (1, 4)]
