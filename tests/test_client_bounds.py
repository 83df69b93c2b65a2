"""A client and a daemon that is slow, silent, stopped, dead, lying or failing: bounded, and never a guess."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import (
    BadRoot,
    CheckpointWarning,
    CorruptCheckpoint,
    NoDaemon,
    NoSpace,
    OutcomeUnknown,
    RunTaken,
    SaveFailed,
    SharedMemoryTooSmall,
    TimedOut,
    UnstorableState,
)
from ckptd.link import daemon_writer, recorder, session, slot_search, wire
from ckptd.snapshot.slots import SlotState
from ckptd_places import places
from fake_daemon import FakeDaemon, wait_until
from impatient import impatient

__all__ = ["places"]


@pytest.fixture
def root(places: Path) -> Root:
    return Root.open(places, create=True)


@pytest.fixture
def fake(root: Root) -> Iterator[FakeDaemon]:
    with FakeDaemon(root) as fake:
        yield fake


def client_of(root: Root, **options: Any) -> ckptd.Client:
    defaults: dict[str, Any] = {
        "daemon": "attach",
        "start_timeout_s": 60.0,
        "busy_timeout_s": 60.0,
        "close_timeout_s": 60.0,
    }
    return ckptd.Client(root.path, **(defaults | options))


def state_of(value: float, size: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((size,), value), "note": [value]}


def values(fake: FakeDaemon) -> list[set[float]]:
    """The distinct values in each snapshot the daemon got."""
    return [
        set(np.frombuffer(data[: 4 * 1000], dtype=np.float32).tolist()) for descriptor, data in fake.snapshots
    ]


# --- slow -----------------------------------------------------------------------------------------


def test_two_snapshots_back_to_back_with_a_slow_writer_are_both_whole(root: Root, fake: FakeDaemon) -> None:
    fake.hold = True
    with client_of(root) as client:
        state = state_of(1.0)
        first = client.snapshot(1, state)
        state["weights"].fill_(2.0)
        second = client.snapshot(2, state)
        state["weights"].fill_(3.0)
        assert (first.state, second.state) in [("staged", "staged"), ("staged", "writing")]
        fake.release()
        client.wait(60)
        assert (first.state, second.state) == ("committed", "committed")
    assert values(fake) == [{1.0}, {2.0}]
    assert [descriptor.step for descriptor, _ in fake.snapshots] == [1, 2]


def test_five_snapshots_with_everything_changed_in_between_have_five_contents(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root) as client:
        for step in range(1, 6):
            state: dict[str, Any] = {"weights": torch.full((1000 * step,), float(step)), f"new{step}": step}
            client.snapshot(step, state)
        client.wait(60)
    assert values(fake) == [{float(step)} for step in range(1, 6)]
    assert [f"new{n}" in descriptor.state for n, (descriptor, _) in enumerate(fake.snapshots, 1)] == [
        True
    ] * 5


def test_a_third_snapshot_waits_for_a_slot_and_is_written(root: Root, fake: FakeDaemon) -> None:
    fake.hold = True
    with client_of(root) as client:
        client.snapshot(1, state_of(1.0))
        client.snapshot(2, state_of(2.0))
        wait_until(lambda: len(fake.named(wire.Push)) == 2)
        fake.release()
        third = client.snapshot(3, state_of(3.0))
        assert third.wait(timeout_s=60).state == "committed"
    assert values(fake) == [{1.0}, {2.0}, {3.0}]


def test_a_writer_slower_than_the_bound_costs_the_bound_and_the_step_that_was_skipped_is_named(
    root: Root, fake: FakeDaemon
) -> None:
    fake.hold = True
    with client_of(root) as client:
        client.snapshot(1, state_of(1.0))
        client.snapshot(2, state_of(2.0))
        began = time.monotonic()
        warned = pytest.warns(CheckpointWarning, match=r"step 3 was skipped.*0\.3 s.*2 snapshots")
        with warned, impatient(client, 0.3):
            third = client.snapshot(3, state_of(3.0))
        assert 0.3 <= time.monotonic() - began < 30
        assert third.state == "skipped"
        with pytest.raises(TimedOut):
            third.wait(timeout_s=60)
        fake.release()
    assert values(fake) == [{1.0}, {2.0}]


def test_with_on_busy_skip_nothing_waits_and_the_step_is_named(root: Root, fake: FakeDaemon) -> None:
    fake.hold = True
    with client_of(root, on_busy="skip", slots=1) as client:
        client.snapshot(1, state_of(1.0))
        began = time.monotonic()
        with pytest.warns(CheckpointWarning, match="step 2 was skipped"):
            assert client.snapshot(2, state_of(2.0)).state == "skipped"
        assert time.monotonic() - began < 30
        fake.release()


def test_fifty_snapshots_use_two_slots_and_the_last_one_is_written(root: Root, fake: FakeDaemon) -> None:
    with client_of(root) as client:
        for step in range(50):
            client.snapshot(step, state_of(float(step)))
        client.wait(60)
        assert len(list(root.slot_dir().iterdir())) == 2
    assert values(fake)[-1] == {49.0}
    assert len(fake.snapshots) == 50


# --- silent, stopped ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_daemon_is_paid_for_once_and_then_at_most_a_second_a_snapshot(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_search, "NO_NEWS_S", 0.1)
    with pytest.warns(CheckpointWarning), client_of(root, close_timeout_s=0.1) as client:
        client.reserve(state_of(0.0))
        fake.stop()
        client.snapshot(1, state_of(1.0))
        client.snapshot(2, state_of(2.0))
        began = time.monotonic()
        with impatient(client, 0.5):
            assert client.snapshot(3, state_of(3.0)).state == "skipped"
        assert time.monotonic() - began >= 0.5
        began = time.monotonic()
        for step in (4, 5):  # not the minute that it would be, once more
            assert client.snapshot(step, state_of(3.0)).state == "skipped"
        assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_stopped_daemon_never_gets_a_committed_out_of_the_client_and_close_keeps_its_bound(
    root: Root, fake: FakeDaemon
) -> None:
    client = client_of(root, close_timeout_s=0.5)
    client.reserve(state_of(0.0))
    fake.stop()
    ticket = client.snapshot(1, state_of(1.0))
    with pytest.raises(TimedOut, match="step 1"):
        ticket.wait(timeout_s=0.2)
    assert ticket.state == "staged"
    began = time.monotonic()
    with pytest.warns(CheckpointWarning, match="step 1 may be saved or not"):
        client.close()
    assert time.monotonic() - began < 30
    assert ticket.state == "unknown"
    with pytest.raises(OutcomeUnknown):
        ticket.wait(timeout_s=60)
    assert [slot.header().state.name for slot in fake.slots.values()].count("SEALED") == 1


def test_a_daemon_that_does_not_answer_attach_costs_start_timeout_s(root: Root, fake: FakeDaemon) -> None:
    fake.stop()
    began = time.monotonic()
    with pytest.raises(TimedOut, match="stopped"):
        client_of(root, start_timeout_s=0.5)
    assert 0.5 <= time.monotonic() - began < 30


@pytest.mark.slow
def test_a_snapshot_before_any_slot_exists_is_skipped_when_the_daemon_is_silent(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root) as client:
        fake.deaf_to = {"Reserve"}
        with (
            pytest.warns(CheckpointWarning, match="step 1 was skipped"),
            impatient(client, start_timeout_s=0.5),
        ):
            assert client.snapshot(1, state_of(1.0)).state == "skipped"
        fake.deaf_to = set()
        assert client.snapshot(2, state_of(2.0)).wait(timeout_s=60).state == "committed"


def test_a_notice_that_was_lost_is_asked_for(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_writer, "_SILENCE_S", 0.1)
    fake.deaf_to = {"Notice"}
    with client_of(root) as client:
        ticket = client.snapshot(1, state_of(1.0))
        assert ticket.wait(timeout_s=60).state == "committed"
    assert fake.named(wire.Resolve)


# --- dead -----------------------------------------------------------------------------------------


def test_with_a_dead_daemon_snapshots_go_on_into_free_slots_and_the_next_daemon_gets_each_once(
    root: Root,
) -> None:
    with FakeDaemon(root) as first:
        client = client_of(root, close_timeout_s=60.0)
        client.reserve(state_of(0.0))
        first.silent = True
        first.die()
        one, two = client.snapshot(1, state_of(1.0)), client.snapshot(2, state_of(2.0))
        assert (one.state, two.state) == ("staged", "staged")
        with FakeDaemon(root) as second:
            second.slots = dict(first.slots)  # it adopted them
            first.slots.clear()
            client.wait(60)
            assert (one.state, two.state) == ("committed", "committed")
            assert values(second) == [{1.0}, {2.0}]
            client.close()


def test_a_snapshot_whose_slot_is_gone_moves_to_a_new_one(root: Root) -> None:
    with FakeDaemon(root, hold=True) as first:
        client = client_of(root, close_timeout_s=60.0)
        client.snapshot(1, state_of(1.0))
        wait_until(lambda: len(first.named(wire.Push)) == 1)
        first.die()
        for slot in first.slots.values():
            slot.path.unlink()
        with FakeDaemon(root) as second:
            client.wait(60)
            assert values(second) == [{1.0}]
            client.close()


def test_what_a_new_daemon_never_heard_of_is_unknown_and_never_committed(root: Root) -> None:
    with FakeDaemon(root) as first:
        first.deaf_to = {"Notice"}
        client = client_of(root, close_timeout_s=60.0)
        ticket = client.snapshot(1, state_of(1.0))
        wait_until(lambda: len(first.snapshots) == 1)  # its slot is free again, its outcome wasn't told
        first.die()
        with FakeDaemon(root):
            with pytest.warns(CheckpointWarning, match="step 1 may be saved or not"):
                client.wait(60)
            assert ticket.state == "unknown"
            client.close()


@pytest.mark.slow
def test_a_dead_daemon_holds_neither_a_snapshot_nor_close_longer_than_start_timeout_s(root: Root) -> None:
    with FakeDaemon(root) as fake:
        client = client_of(root)
        client.reserve(state_of(0.0))
        fake.silent = True
        fake.die()
        client.snapshot(1, state_of(1.0))
        client.snapshot(2, state_of(1.0))
        began = time.monotonic()
        with impatient(client, 60.0, start_timeout_s=0.5):
            with pytest.warns(CheckpointWarning, match=r"step 3 was skipped.*ckptd start"):
                client.snapshot(3, state_of(1.0))
            with pytest.warns(CheckpointWarning, match="step [12] may be saved or not"):
                client.close()
        assert time.monotonic() - began < 30


def test_a_run_that_was_taken_meanwhile_is_said_at_the_next_wait(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LEAVING_CLIENT_S", 0.1)
    with FakeDaemon(root, hold=True) as first:
        client = client_of(root, close_timeout_s=0.1)
        client.snapshot(1, state_of(1.0))
        wait_until(lambda: len(first.named(wire.Push)) == 1)
        first.die()
        with FakeDaemon(root) as second:
            second.refuse = RunTaken("the run already has a live client", seen="pid 1")
            with pytest.raises(RunTaken):
                client.wait(60)
            with pytest.warns(CheckpointWarning):
                client.close()


def test_no_daemon_at_all_is_an_error_at_the_start_with_attach(root: Root) -> None:
    with pytest.raises(NoDaemon, match="ckptd start"):
        client_of(root)


def test_a_client_that_insists_on_a_daemon_leaves_a_folder_without_one_as_it_was(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises((NoDaemon, BadRoot), match=str(path)):
            ckptd.Client(path, daemon="attach", start_timeout_s=0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_second_live_client_is_refused_by_pid(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LEAVING_CLIENT_S", 0.0)
    fake.refuse = RunTaken("the run already has a live client", seen="pid 4711")
    with pytest.raises(RunTaken, match="4711"):
        client_of(root)


# --- lying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [{"step": 2}, {"client_id": "ff" * 16}, {"name": "../../etc"}, {"name": "step-000000002"}, {"name": ""},
     {"state": "done"}, {"snapshot": 9}],
    ids=str,
)  # fmt: skip
def test_a_notice_that_is_not_exactly_about_the_snapshot_commits_nothing(
    root: Root, fake: FakeDaemon, lie: dict[str, Any]
) -> None:
    fake.twist = lambda notice: msgspec.structs.replace(notice, **lie)
    client = client_of(root, close_timeout_s=0.1)
    ticket = client.snapshot(1, state_of(1.0))
    with pytest.raises(TimedOut):
        ticket.wait(timeout_s=0.3)
    assert not ticket.committed
    assert ticket.path is None
    with pytest.warns(CheckpointWarning, match="step 1 may be saved or not"):
        client.close()


def test_a_late_notice_takes_nothing_back(root: Root, fake: FakeDaemon) -> None:
    with client_of(root) as client:
        ticket = client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        wrong = wire.Notice(id=0, client_id=client._client_id, snapshot=1, step=1, state="failed")
        fake.say(wrong)
        fake.say(msgspec.structs.replace(wrong, state="writing"))
        client.status()
        assert ticket.state == "committed"


# --- failing --------------------------------------------------------------------------------------


def test_a_failure_is_a_warning_at_the_next_snapshot_and_saving_goes_on(root: Root, fake: FakeDaemon) -> None:
    fake.fail = NoSpace("the disk is full", where="/data", todo="free some space")
    with client_of(root) as client:
        client.snapshot(1, state_of(1.0))
        wait_until(lambda: len(fake.snapshots) == 1)
        client.status()
        fake.fail = None
        with pytest.warns(
            CheckpointWarning, match=r"/data: step 1 was not saved: the disk is full; free some space"
        ):
            ticket = client.snapshot(2, state_of(2.0))
        assert ticket.wait(timeout_s=60).state == "committed"


def test_with_on_error_raise_the_failure_is_raised_at_the_next_call(root: Root, fake: FakeDaemon) -> None:
    fake.fail = NoSpace("the disk is full")
    with client_of(root, on_error="raise") as client:
        client.snapshot(1, state_of(1.0))
        with pytest.raises(NoSpace, match="step 1 was not saved"):
            client.wait(60)
        client.wait(60)  # said once


def test_once_nothing_was_committed_for_max_unsaved_s_a_failure_is_an_error(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root, max_unsaved_s=0.0) as client:
        client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        fake.fail = NoSpace("the disk is full")
        client.snapshot(2, state_of(1.0))
        with (
            pytest.warns(CheckpointWarning, match="step 2"),
            pytest.raises(SaveFailed, match="nothing was committed"),
        ):
            client.wait(60)
        fake.fail = None
        with pytest.raises(SaveFailed):
            client.snapshot(3, state_of(1.0))
        client._failures.committed(0.0, others_wait=False)


def test_saving_resumes_by_itself_after_the_error_about_max_unsaved_s(root: Root, fake: FakeDaemon) -> None:
    with client_of(root, max_unsaved_s=0.0) as client:
        fake.fail = NoSpace("the disk is full")
        client.snapshot(1, state_of(1.0))
        with pytest.warns(CheckpointWarning, match="step 1"), pytest.raises(SaveFailed):
            client.wait(60)
        fake.fail = None
        with pytest.raises(SaveFailed, match="nothing was committed"):
            client.snapshot(2, state_of(2.0))
        client.wait(60)  # step 2 was taken and is committed: nothing more to complain about
        assert client.snapshot(3, state_of(3.0)).wait(timeout_s=60).state == "committed"


def test_a_failure_raised_by_a_ticket_is_not_said_again(root: Root, fake: FakeDaemon) -> None:
    fake.fail = SaveFailed("input/output error")
    with client_of(root) as client:
        with pytest.raises(SaveFailed, match="input/output"):
            client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        client.wait(60)


def test_a_checkpoint_found_corrupt_is_reported_and_wait_verified_raises(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root) as client:
        ticket = client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        error = wire.WireError.of(CorruptCheckpoint("sha256 is wrong", where="model.shard-000.pt"))
        notice = wire.Notice(
            id=0, client_id=client._client_id, snapshot=1, step=1, state="corrupt", sequence=1,
            name="step-000000001", error=error,
        )  # fmt: skip
        fake.say(notice)
        with pytest.raises(CorruptCheckpoint, match=r"model\.shard-000\.pt"):
            ticket.wait("verified", timeout_s=60)
        fake.say(msgspec.structs.replace(notice, snapshot=5, step=5))
        client.status()
        with pytest.warns(CheckpointWarning, match="step 5 is corrupt on disk"):
            client.wait(60)


# --- the state, the slots -------------------------------------------------------------------------


def test_what_cannot_be_stored_is_refused_by_key_path_and_the_next_snapshot_works(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root) as client:
        with pytest.raises(UnstorableState, match=r"state\['a'\]\[1\]"):
            client.snapshot(1, {"a": [1, lambda: 0]})
        with pytest.raises(UnstorableState, match="bad"):
            client.snapshot(1, {"bad": _Broken()})
        assert client.snapshot(2, state_of(2.0)).wait(timeout_s=60).state == "committed"
    assert values(fake) == [{2.0}]


class _Broken:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("half built")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_copy_that_fails_half_way_leaves_a_free_slot_and_no_snapshot(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(captured: object, memory: memoryview, threads: object) -> None:
        raise RuntimeError("device lost")

    with client_of(root, slots=1) as client:
        with monkeypatch.context() as patched:
            patched.setattr(recorder, "copy_at_once", fails)
            with pytest.raises(RuntimeError, match="device lost"):
                client.snapshot(1, state_of(1.0))
        assert [slot.header().state for slot in fake.slots.values()] == [SlotState.FREE]
        assert client.snapshot(2, state_of(2.0)).wait(timeout_s=60).state == "committed"
    assert values(fake) == [{2.0}]


def test_a_state_that_outgrows_its_slots_gets_larger_ones(root: Root, fake: FakeDaemon) -> None:
    with client_of(root) as client:
        client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        before = {slot.capacity for slot in fake.slots.values()}
        for step in (2, 3, 4):
            client.snapshot(step, state_of(float(step), size=4_000_000))
        client.wait(60)
        assert min(slot.capacity for slot in fake.slots.values()) > max(before)
        assert len(list(root.slot_dir().iterdir())) == 2
    assert [len(data) for _, data in fake.snapshots][1:] == [len(fake.snapshots[1][1])] * 3


def test_a_history_that_grows_has_new_slots_made_seldom(root: Root, fake: FakeDaemon) -> None:
    state = state_of(1.0)
    state["losses"] = []
    with client_of(root) as client:
        client.reserve(state)
        for step in range(1, 21):
            state["losses"] += [0.5] * 25_000  # 200 KB each, 4 MB in all
            client.snapshot(step, state).wait(timeout_s=60)
    assert len(fake.named(wire.Reserve)) <= 3


def test_a_state_too_large_for_shared_memory_is_refused_before_copying_with_the_fix(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[object] = []
    monkeypatch.setattr(recorder, "copy_at_once", lambda captured, *_: copied.append(captured))
    with client_of(root, transport="shm") as client:
        fake.refuse = SharedMemoryTooSmall(
            "no room for a slot", where="/dev/shm", seen="64 MB", wanted="400 MB"
        )
        with pytest.raises(SharedMemoryTooSmall, match=r'/dev/shm.*64 MB.*--shm-size.*slots=1.*daemon="off"'):
            client.snapshot(1, state_of(1.0))
        fake.refuse = SharedMemoryTooSmall("no room for a slot", where="/dev/shm")
        with pytest.raises(SharedMemoryTooSmall):
            client.reserve(state_of(1.0))
    assert copied == []
    assert fake.snapshots == []


def test_with_one_slot_the_way_out_is_not_one_slot(root: Root, fake: FakeDaemon) -> None:
    with client_of(root, transport="shm", slots=1) as client:
        fake.refuse = SharedMemoryTooSmall("no room for a slot", where="/dev/shm")
        with pytest.raises(SharedMemoryTooSmall, match=r"--shm-size[^,]*, or save without it"):
            client.reserve(state_of(1.0))


# --- restoring ------------------------------------------------------------------------------------


def test_restore_waits_for_an_earlier_clients_snapshots_and_gives_up_loudly(
    root: Root, fake: FakeDaemon
) -> None:
    fake.pending = 1
    with client_of(root) as client:
        fake.deaf_to = {"Drain"}
        with pytest.raises(TimedOut, match="drained"), impatient(client):
            client.restore(state_of(1.0))
        fake.deaf_to = set()
        assert client.restore(state_of(1.0)) is None
    assert len(fake.named(wire.Drain)) == 2
