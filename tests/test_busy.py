"""No slot is free: what gives way, what is skipped, what the caller and the daemon are told, and for how long it takes."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import CheckpointWarning, OutcomeUnknown, SaveFailed, TimedOut
from ckptd.limits import MAX_SKIPPED_TOLD
from ckptd.link import giving_way, slot_search, wire
from ckptd.link.skipped import SkippedSteps
from ckptd_places import daemon_of, places
from fake_daemon import FakeDaemon, wait_until
from impatient import impatient
from obstructed_daemon import obstructed_daemon
from told_signals import stop

__all__ = ["places"]

POLICIES = ["wait", "skip", "supersede"]


@pytest.fixture
def root(places: Path) -> Root:
    return Root.open(places, create=True)


@pytest.fixture
def fake(root: Root) -> Iterator[FakeDaemon]:
    with FakeDaemon(root, hold=True) as fake:
        yield fake


def client_of(root: Root, **options: Any) -> ckptd.Client:
    defaults: dict[str, Any] = {
        "daemon": "attach", "start_timeout_s": 60.0, "busy_timeout_s": 60.0, "close_timeout_s": 60.0,
    }  # fmt: skip
    return ckptd.Client(root.path, **(defaults | options))


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value)}


def pushed(fake: FakeDaemon, count: int) -> None:
    wait_until(lambda: len(fake.named(wire.Push)) == count)


# --- who gives way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_busy", ["skip", "supersede"])
def test_the_oldest_that_is_not_being_written_gives_way_and_is_no_error(
    root: Root, fake: FakeDaemon, on_busy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_way, "_ANSWER_S", 60.0)  # however loaded the machine is
    fake.queues = True
    with client_of(root, on_busy=on_busy, on_error="raise") as client:
        first, second = (client.snapshot(step, state_of(step)) for step in (1, 2))
        with pytest.warns(CheckpointWarning, match=r"step 1 was superseded: a newer snapshot took its slot"):
            third = client.snapshot(3, state_of(3.0))
        assert (first.state, second.state, third.state) == ("superseded", "staged", "staged")
        with pytest.raises(SaveFailed, match="a newer snapshot"):
            first.wait(timeout_s=60)
        fake.release()
        client.wait(60)
    assert [descriptor.step for descriptor, _ in fake.snapshots] == [2, 3]
    assert [(one.snapshot, one.step) for one in fake.named(wire.Supersede)] == [(1, 1)]  # type: ignore[union-attr]


def test_what_the_daemon_has_not_accepted_yet_gives_way_a_moment_later(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giving_way, "_ANSWER_S", 60.0)  # however loaded the machine is
    fake.queues, fake.not_taken_in = True, {1}
    with client_of(root, on_busy="skip", slots=1) as client:
        first = client.snapshot(1, state_of(1.0))

        def take_in_when_asked() -> None:
            wait_until(lambda: len(fake.named(wire.Supersede)) >= 2)
            fake.not_taken_in = set()

        helper = threading.Thread(target=take_in_when_asked)
        helper.start()
        with pytest.warns(CheckpointWarning, match="step 1 was superseded"):
            second = client.snapshot(2, state_of(2.0))
        helper.join()
        assert (first.state, second.state) == ("superseded", "staged")
        fake.release()


def test_with_one_slot_that_is_being_written_supersede_waits_for_the_write(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root, on_busy="supersede", slots=1) as client:
        first = client.snapshot(1, state_of(1.0))
        pushed(fake, 1)

        def release_when_asked() -> None:
            wait_until(lambda: bool(fake.named(wire.Supersede)))
            fake.release()

        helper = threading.Thread(target=release_when_asked)
        helper.start()
        second = client.snapshot(2, state_of(2.0))
        helper.join()
        client.wait(60)
        assert first.committed and second.committed
    assert [descriptor.step for descriptor, _ in fake.snapshots] == [1, 2]


def test_with_one_slot_that_is_being_written_supersede_waits_no_longer_than_the_bound(
    root: Root, fake: FakeDaemon
) -> None:
    with client_of(root, on_busy="supersede", slots=1) as client:
        first = client.snapshot(1, state_of(1.0))
        pushed(fake, 1)
        began = time.monotonic()
        warned = pytest.warns(CheckpointWarning, match=r"step 2 was skipped.*0\.3 s.*1 snapshot still")
        with warned, impatient(client, 0.3):
            assert client.snapshot(2, state_of(2.0)).state == "skipped"
        assert 0.3 <= time.monotonic() - began < 30
        fake.release()
        assert first.wait(timeout_s=60).committed


def test_where_errors_are_raised_a_wait_that_takes_too_long_is_one(root: Root, fake: FakeDaemon) -> None:
    with client_of(root, on_busy="wait", slots=1, on_error="raise") as client:
        client.snapshot(1, state_of(1.0))
        with pytest.raises(TimedOut, match="step 2 was skipped"), impatient(client, 0.1):
            client.snapshot(2, state_of(2.0))
        fake.release()
        client.wait(60)


def test_where_errors_are_raised_a_skip_that_was_asked_for_is_none(root: Root, fake: FakeDaemon) -> None:
    with client_of(root, on_busy="skip", slots=1, on_error="raise") as client:
        client.snapshot(1, state_of(1.0))
        with pytest.warns(CheckpointWarning, match="step 2 was skipped: no slot is free"):
            client.snapshot(2, state_of(2.0))
        fake.release()


def test_a_daemon_that_does_not_answer_costs_a_skip_one_answers_time_and_then_nothing(
    root: Root, fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.queues = True
    with pytest.warns(CheckpointWarning), client_of(root, on_busy="skip", close_timeout_s=0.1) as client:
        for step in (1, 2):
            client.snapshot(step, state_of(step))
        pushed(fake, 2)
        client.status()  # all that it has said is heard: who hears of it meanwhile waits once more
        fake.stop()
        took = list[float]()
        for answer_s, steps in ((0.5, [3]), (60.0, [4, 5, 6, 7])):
            monkeypatch.setattr(giving_way, "_ANSWER_S", answer_s)
            began = time.monotonic()
            for step in steps:
                assert client.snapshot(step, state_of(step)).state == "skipped"
            took.append(time.monotonic() - began)
        assert took[0] >= 0.5
        assert took[1] < 60


# --- what the daemon is told ------------------------------------------------------------------------


def told(fake: FakeDaemon) -> list[tuple[int, list[int]]]:
    return [(one.count, one.steps) for one in fake.named(wire.Skipped)]  # type: ignore[union-attr]


def test_each_skip_is_a_warning_of_its_own_and_the_daemon_is_told_one_message_at_a_time(
    root: Root, fake: FakeDaemon
) -> None:
    fake.deaf_to = {"Skipped"}
    with client_of(root, on_busy="skip", slots=1) as client:
        client.snapshot(0, state_of(0.0))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default", CheckpointWarning)
            for step in range(1, 51):
                client.snapshot(step, state_of(step))
        assert [f"step {n} was skipped" in str(one.message) for n, one in enumerate(said, 1)] == [True] * 50
        wait_until(lambda: bool(told(fake)))
        assert told(fake) == [(1, [1])]
        fake.release()
    assert told(fake)[1:] == [(50, list(range(1, 51)))]


def test_a_daemon_that_comes_later_is_told_the_whole_count(root: Root) -> None:
    with FakeDaemon(root, hold=True) as first:
        client = client_of(root, on_busy="skip", slots=1, close_timeout_s=0.1)
        ticket = client.snapshot(1, state_of(1.0))
        with pytest.warns(CheckpointWarning, match="step [23] was skipped"):
            for step in (2, 3):
                client.snapshot(step, state_of(step))
        wait_until(lambda: bool(told(first)) and told(first)[-1][0] >= 1)
        first.silent = True
        first.die()
        with FakeDaemon(root) as second:
            second.slots = dict(first.slots)
            first.slots.clear()
            wait_until(lambda: not ticket.finished and bool(ticket.state and told(second)))
            assert told(second)[0][0] == 2
            with pytest.warns(CheckpointWarning, match="step 1 may be saved or not"):
                client.close()


def test_of_very_many_that_nobody_hears_of_the_newest_steps_are_kept_and_all_are_counted() -> None:
    skipped = SkippedSteps("c" * 32)
    assert skipped.due() is None
    for step in range(1000):
        skipped.add(step)
    message = skipped.due()
    assert message is not None and message.count == 1000
    assert message.steps == list(range(1000 - MAX_SKIPPED_TOLD, 1000))
    skipped.sent(7)
    again = skipped.due(at_last=True)  # it may never have arrived
    assert again is not None and again.count == 1000
    skipped.add(1000)
    assert skipped.due() is None and skipped.due(at_last=True) is not None
    skipped.answered(6)
    assert skipped.due() is None
    skipped.answered(7)
    message = skipped.due()
    assert message is not None and (message.count, message.steps) == (1001, [1000])


# --- field case 34: nobody there --------------------------------------------------------------------


def save_until_the_end(root: Root, client: ckptd.Client, first: int) -> tuple[list[ckptd.Ticket], float]:
    """Four snapshots and the end, whatever is said; the tickets and how long it took."""
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        tickets = [client.snapshot(step, state_of(step)) for step in range(first, first + 4)]
        client.close()
    return tickets, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("on_busy", POLICIES)
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_no_policy_waits_longer_than_the_caller_said_or_says_committed_without_a_daemon(
    places: Path, on_busy: Any, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_search, "NO_NEWS_S", 0.1)
    with obstructed_daemon(places, "--keep-last", "100") as daemon:
        root = Root.open(places, create=True)
        client = client_of(root, on_busy=on_busy, busy_timeout_s=0.5, close_timeout_s=0.5)
        client.snapshot(1, state_of(1.0)).wait(timeout_s=30)
        daemon.obstruct("write", "*/.tmp-*/*.pt", "stall")
        between = client.snapshot(2, state_of(2.0))  # received, and not written
        daemon.wait_until_stalled()
        if end == "stopped":
            stop(daemon.process.pid)
        else:
            daemon.process.kill()
            daemon.process.wait()
        tickets, took = save_until_the_end(root, client, 3)
        assert took < 30  # each of the bounds once, and the time of a loaded machine
        assert {between.state, *(ticket.state for ticket in tickets)} <= {"unknown", "skipped"}
        assert not any(ticket.committed for ticket in (between, *tickets))
        with pytest.raises(OutcomeUnknown):
            between.wait(timeout_s=0.1)
        daemon.clear()
        if end == "stopped":
            os.kill(daemon.process.pid, signal.SIGCONT)
        sealed = {ticket.step for ticket in (between, *tickets) if ticket.state == "unknown"}
    with obstructed_daemon(places, "--keep-last", "100"):
        assert daemon_of(places) is not None
        with client_of(root) as client:
            client.drain(60)
            steps = {one.step for one in client.checkpoints()}
    assert steps == {1} | sealed and 2 in sealed
