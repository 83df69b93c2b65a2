"""Tickets, the outbox and the ledger of failures, as values: no socket, no clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import (
    CheckpointGone,
    CheckpointWarning,
    CorruptCheckpoint,
    NoDaemon,
    NoSpace,
    OutcomeUnknown,
    ProtocolError,
    SaveFailed,
)
from ckptd.link import wire
from ckptd.link.failures import Failure, Failures
from ckptd.link.outbox import Outbox
from ckptd.link.staging import Payload, SlotSet, Staged, fill
from ckptd.link.ticket import Ticket, TicketState
from ckptd.snapshot.slots import Slot, SlotState

CLIENT = "c1" * 16


class NoNews:
    def look(self) -> None: ...
    def wait_for(self, ticket: Ticket, state: str, timeout_s: float) -> None: ...
    def was_told(self, ticket: Ticket) -> None: ...


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    slot = Slot.create(tmp_path / f"slot-{CLIENT}-0-00000000", 64 * 1024)
    yield slot
    slot.close()


def stage(outbox: Outbox, slot: Slot, snapshot: int = 1) -> Staged:
    payload = Payload(lambda memory: None, 0, b"descriptor")
    staged = Staged(Ticket(snapshot, 10, NoNews()), slot, fill(slot, (CLIENT, "default"), snapshot, payload))
    outbox.add(staged)
    return staged


def notice(state: str, **more: object) -> wire.Notice:
    fields = {
        "id": 0,
        "client_id": CLIENT,
        "snapshot": 1,
        "step": 10,
        "sequence": 3,
        "name": "step-000000010",
    }
    return wire.Notice(**(fields | {"state": state} | more))  # type: ignore[arg-type]


@pytest.fixture
def failures() -> Failures:
    return Failures("raise", 60.0)


@pytest.fixture
def outbox(failures: Failures) -> Outbox:
    return Outbox(CLIENT, Path("/root/default"), failures)


# --- the outbox -----------------------------------------------------------------------------------


def test_committed_and_verified_come_in_this_order_or_at_once(outbox: Outbox, slot: Slot) -> None:
    ticket = stage(outbox, slot).ticket
    outbox.take(notice("writing"), 0.0)
    assert ticket.state == "writing"
    outbox.take(notice("verified"), 0.0)
    assert (ticket.state, ticket.path, ticket.sequence) == (
        "verified",
        Path("/root/default/step-000000010"),
        3,
    )
    assert not outbox
    outbox.take(notice("committed"), 0.0)
    assert ticket.state == "verified"


@pytest.mark.parametrize("state", ["staged", "failed", "committed"])
def test_a_step_that_the_daemon_has_not_read_yet_is_no_wrong_step(
    outbox: Outbox, slot: Slot, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    ticket = stage(outbox, slot).ticket
    outbox.take(notice(state, step=0), 0.0)
    assert ticket.state == state and not caplog.records


def test_another_step_or_a_name_of_another_step_commits_nothing(outbox: Outbox, slot: Slot) -> None:
    ticket = stage(outbox, slot).ticket
    outbox.take(notice("committed", step=11), 0.0)
    outbox.take(notice("committed", step=0, name="step-000000011"), 0.0)
    assert ticket.state == "staged"


def test_a_failed_write_that_a_later_daemon_makes_good_is_committed(outbox: Outbox, slot: Slot) -> None:
    ticket = Ticket(1, 10, NoNews())
    for state, moved in (("failed", True), ("writing", False), ("committed", True), ("failed", False)):
        assert ticket.become(state) is moved  # type: ignore[arg-type]
    assert ticket.error is None


@pytest.mark.parametrize("state", ["committed", "verified", "corrupt"])
def test_nothing_is_ever_taken_back_from_saved(state: TicketState) -> None:
    ticket = Ticket(1, 10, NoNews())
    assert ticket.become(state)
    for back in ("staged", "writing", "unknown", "failed", "superseded", "skipped"):
        assert not ticket.become(back)  # type: ignore[arg-type]
    assert ticket.committed


def test_why_an_outcome_is_unknown_is_told_as_the_daemon_says_it(slot: Slot, tmp_path: Path) -> None:
    outbox = Outbox(CLIENT, tmp_path, Failures("warn", 60.0))
    staged = stage(outbox, slot)
    slot.release()
    said = OutcomeUnknown("its name could not be made durable", where="step-000000010", todo="check the disk")
    outbox.take(notice("unknown", error=wire.WireError.of(said)), 0.0)
    assert str(staged.ticket.error) == str(said)


def test_a_snapshot_unknown_to_the_daemon_is_pushed_again_while_its_slot_holds_it(
    outbox: Outbox, slot: Slot, failures: Failures
) -> None:
    staged = stage(outbox, slot)
    assert outbox.take(notice("unknown", step=0, name=""), 0.0) is staged
    slot.mark_writing(5)
    assert outbox.take(notice("unknown", step=0, name=""), 0.0) is staged
    slot.release()
    assert outbox.take(notice("unknown", step=0, name=""), 0.0) is None
    assert staged.ticket.state == "unknown"
    with pytest.raises(OutcomeUnknown, match="step 10 may be saved or not"):
        failures.surface(0.0)


def test_a_daemon_that_leaves_fails_no_snapshot_the_next_one_takes_it(
    outbox: Outbox, slot: Slot, failures: Failures
) -> None:
    staged = stage(outbox, slot)
    outbox.refused(1, NoDaemon("the daemon is leaving"))
    assert (staged.ticket.state, outbox.staged) == ("staged", [staged])
    failures.surface(0.0)
    outbox.take(notice("committed"), 0.0)  # by the next one
    assert staged.ticket.state == "committed"


def test_a_refused_push_counts_only_while_the_slot_still_holds_the_snapshot(
    outbox: Outbox, slot: Slot, failures: Failures
) -> None:
    staged = stage(outbox, slot)
    slot.mark_writing(5)  # an earlier push of it was taken
    outbox.refused(1, SaveFailed("not that slot"))
    slot.release()
    outbox.refused(1, SaveFailed("not that slot"))
    assert staged.ticket.state == "staged"
    outbox.take(notice("committed"), 0.0)
    assert staged.ticket.state == "committed"
    stage(outbox, slot, 2)
    outbox.refused(2, SaveFailed("not that slot"))
    with pytest.raises(SaveFailed):
        failures.surface(0.0)


def test_corrupt_is_reported_also_when_nobody_holds_the_ticket(
    outbox: Outbox, slot: Slot, failures: Failures
) -> None:
    stage(outbox, slot)
    outbox.take(notice("committed"), 0.0)
    gc.collect()
    error = wire.WireError.of(CorruptCheckpoint("sha256 is wrong", where="ckpt.pt"))
    outbox.take(notice("corrupt", error=error), 0.0)
    with pytest.raises(CorruptCheckpoint, match="step 10 is corrupt on disk"):
        failures.surface(0.0)


def test_what_was_removed_is_not_said_to_be_corrupt(outbox: Outbox, slot: Slot, failures: Failures) -> None:
    stage(outbox, slot)
    outbox.take(notice("committed"), 0.0)
    error = wire.WireError.of(CheckpointGone("it was removed before it could be verified", where="step-10"))
    outbox.take(notice("corrupt", error=error), 0.0)
    with pytest.raises(CheckpointGone, match="step 10 is gone from the disk"):
        failures.surface(0.0)


def test_accepted_gives_the_sequence(outbox: Outbox, slot: Slot) -> None:
    ticket = stage(outbox, slot).ticket
    outbox.accepted(wire.Accepted(id=1, snapshot=1, sequence=8))
    outbox.accepted(wire.Accepted(id=2, snapshot=99, sequence=9))
    assert ticket.sequence == 8


# --- the ledger -----------------------------------------------------------------------------------


def failure(step: int = 1) -> Failure:
    return Failure(step, step, NoSpace("the disk is full", where="/data", todo="free some"))


def test_failures_are_warnings_until_nothing_was_committed_for_too_long() -> None:
    ledger = Failures("warn", 60.0)
    ledger.attempted(0.0)
    ledger.failed(failure(1))
    with pytest.warns(CheckpointWarning, match="step 1 was not saved"):
        ledger.surface(59.0)
    ledger.surface(60.0)
    with pytest.raises(SaveFailed, match=r"nothing was committed for 61 s.*free some"):
        ledger.surface(61.0)
    ledger.surface(61.0, may_raise=False)


def test_a_commit_starts_the_clock_anew_and_stops_it_when_nothing_else_waits() -> None:
    ledger = Failures("warn", 60.0)
    ledger.attempted(0.0)
    ledger.committed(50.0, others_wait=True)
    ledger.failed(failure())
    with pytest.warns(CheckpointWarning):
        ledger.surface(109.0)
    ledger.committed(109.0, others_wait=False)
    ledger.surface(10_000.0)
    ledger.attempted(10_000.0)
    ledger.failed(failure(2))
    with pytest.warns(CheckpointWarning, match="step 2"):
        ledger.surface(10_059.0)


def test_a_slow_writer_without_a_failure_is_no_error() -> None:
    ledger = Failures("warn", 60.0)
    ledger.attempted(0.0)
    ledger.surface(10_000.0)


def test_several_failures_are_all_said_also_one_by_one_when_raised() -> None:
    ledger = Failures("warn", 60.0)
    for step in (1, 2):
        ledger.failed(failure(step))
    with pytest.warns(CheckpointWarning) as said:
        ledger.surface(0.0)
    assert [str(one.message)[:14] for one in said] == ["/data: step 1 ", "/data: step 2 "]
    raising = Failures("raise", 60.0)
    for step in (1, 2):
        raising.failed(failure(step))
    for step in (1, 2):
        with pytest.raises(NoSpace, match=f"step {step}"):
            raising.surface(0.0)
    raising.surface(0.0)


def test_a_warning_points_at_the_callers_own_line() -> None:
    ledger = Failures("warn", 60.0)
    ledger.failed(failure())
    with pytest.warns(CheckpointWarning) as said:
        ledger.surface(0.0)
    assert said[0].filename == __file__


# --- the slots ------------------------------------------------------------------------------------


def infos(*slots: Slot) -> list[wire.SlotInfo]:
    return [wire.SlotInfo(name=slot.name, bytes=slot.capacity) for slot in slots]


def test_only_slots_of_this_client_are_mapped(tmp_path: Path, slot: Slot) -> None:
    slots = SlotSet(CLIENT, "default")
    other = "d2" * 16
    for name in (f"slot-{other}-0-00000000", "../x", f"slot-{CLIENT}-0-00000000/../y", ""):
        with pytest.raises(ProtocolError):
            slots.update(str(tmp_path), [wire.SlotInfo(name=name, bytes=1)])
    with pytest.raises(ProtocolError):
        slots.update("relative", infos(slot))
    slots.update(str(tmp_path), [*infos(slot), wire.SlotInfo(name=f"slot-{CLIENT}-1-00000000", bytes=1)])
    assert len(slots) == 1  # the other one is gone already
    slots.close()


def test_a_slot_that_a_failed_copy_left_filling_is_free_after_the_next_attachment(
    tmp_path: Path, slot: Slot
) -> None:
    slot.begin(CLIENT, "default", 1)
    slots = SlotSet(CLIENT, "default")
    slots.update(str(tmp_path), infos(slot))
    assert slots.find_free(1) is not None
    assert slots.find_free(slot.capacity + 1) is None
    assert slots.must_grow(slot.capacity + 1, 1)
    assert not slots.must_grow(slot.capacity, 1)
    slots.close()


def test_a_slot_that_the_daemon_has_removed_is_unmapped_but_not_what_was_put_into_it_since(
    tmp_path: Path, slot: Slot
) -> None:
    slots = SlotSet(CLIENT, "default")
    slots.update(str(tmp_path), infos(slot))
    mine = slots.find_free(1)
    assert mine is not None
    mine.begin(CLIENT, "default", 1)
    slots.forget(mine.name)
    assert mine not in slots and mine.header().state is SlotState.FILLING  # still mapped
    mine.close()
    slot.release()
    slots.update(str(tmp_path), infos(slot))
    free = slots.find_free(1)
    assert free is not None
    slots.forget(free.name)
    assert len(slots) == 0
    with pytest.raises(ValueError, match="released"):
        free.header()
    slots.forget("slot-that-nobody-has")


def test_a_slot_with_an_unsaved_snapshot_stays_mapped_when_it_is_listed_no_more(
    tmp_path: Path, slot: Slot
) -> None:
    slots = SlotSet(CLIENT, "default")
    slots.update(str(tmp_path), infos(slot))
    mine = slots.find_free(1)
    assert mine is not None
    fill(mine, (CLIENT, "default"), 1, Payload(lambda memory: memory.__setitem__(0, 7), 8, b"d"))
    slot.path.unlink()
    slots.update(str(tmp_path), [], keep=[mine])
    assert mine not in slots
    assert mine.data[0] == 7
    mine.close()


def test_what_was_written_and_lost_its_slot_before_anybody_heard_of_it_is_in_no_slot(tmp_path: Path) -> None:
    """Its slot is free again, and somebody has removed the file: it is given up when a free one is looked for."""
    made = Slot.create(tmp_path / f"slot-{CLIENT}-0-00000000", 64 * 1024)
    slots = SlotSet(CLIENT, "default")
    slots.update(str(tmp_path), [wire.SlotInfo(name=made.name, bytes=made.capacity)])
    (slot,) = slots
    staged = stage(Outbox(CLIENT, tmp_path, Failures("warn", 60.0)), slot)
    assert staged.in_slot()
    made.mark_writing(1)
    made.release()
    made.path.unlink()
    assert slots.find_free(made.capacity) is None
    assert slot.closed and not staged.in_slot()
    made.close()
