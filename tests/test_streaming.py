"""Snapshots that are streamed, with real daemons: they come out byte for byte, whoever dies, stops or is lost meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import ckptd
from ckptd.errors import CheckpointWarning, NoDaemon, OverBudget, SharedMemoryTooSmall
from ckptd.limits import MAX_CREDIT_BYTES, MAX_FRAME_BYTES
from ckptd.link import giving_way, route, stream_sender
from ckptd.link.connection import Connection
from ckptd.link.outgoing import Outgoing, Piece
from ckptd.link.stream_sender import StreamSender
from ckptd_places import daemon_of, end_daemon, places
from daemon_parts import eventually
from impatient import impatient
from live_daemon import ckptd as ckptd_command
from live_daemon import detached, wait_until
from told_signals import stop

__all__ = ["places"]

MIB = 1024 * 1024


def state_of(mib: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randint(0, 255, (mib * MIB,), dtype=torch.uint8, generator=generator),
        "number": seed,
    }


def assert_saved(root: Path, state: dict[str, Any], step: int, run: str = "default") -> None:
    loaded = ckptd.load(root / run / f"step-{step:09d}")
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["number"] == state["number"]


def status_of(client: ckptd.Client, run: str = "default") -> dict[str, Any]:
    (found,) = [one for one in client.status()["runs"] if one["run"] == run]
    return dict(found)


@contextmanager
def held_at(
    monkeypatch: pytest.MonkeyPatch, pieces: int, then: Callable[[], None] | None = None
) -> Iterator[Any]:
    """Streams stop once so many pieces were sent; yields (an event that says so, one that lets them go on, offsets)."""
    reached, go_on, sent = threading.Event(), threading.Event(), []
    original = Outgoing.next_piece

    def next_piece(outgoing: Outgoing) -> Piece | None:
        if len(sent) == pieces and not go_on.is_set():
            reached.set()
            assert go_on.wait(60)
            if then is not None:
                then()
        piece = original(outgoing)
        if piece is not None:
            sent.append(piece[0])
        return piece

    monkeypatch.setattr(Outgoing, "next_piece", next_piece)
    # However loaded the machine is: else what the daemon is silent about for so long is sent again.
    monkeypatch.setattr(stream_sender, "_ASK_AGAIN_S", 60.0)
    monkeypatch.setattr(stream_sender, "_CONNECT_AGAIN_S", 120.0)
    try:
        yield reached, go_on, sent
    finally:
        go_on.set()


def test_a_streamed_snapshot_is_saved_byte_for_byte_and_takes_no_shared_memory(places: Path) -> None:
    state = state_of(9)
    with ckptd.Client(places, transport="stream") as client:
        client.reserve(state)
        tickets = [client.snapshot(step, state_of(9, step)) for step in (1, 2, 3)]
        for ticket in tickets:
            ticket.wait("verified", timeout_s=60)
        assert [ticket.sequence for ticket in tickets] == [1, 2, 3]
        said = status_of(client)
        assert said["client"]["transport"] == "stream"
        assert f"pid {os.getpid()} (stream)" in ckptd_command("status", "--root", places).stdout
        assert {slot["name"].split("-")[0] for slot in said["slots"]} == {"stream"} and len(
            said["slots"]
        ) <= 2
        assert not list(Path(os.environ["CKPTD_SHM_DIR"]).rglob("slot-*"))
    for step in (1, 2, 3):
        assert_saved(places, state_of(9, step), step)
    assert [one.name for one in threading.enumerate() if one.name == "ckptd-stream"] == []


def test_a_socket_that_cant_be_looked_at_when_a_client_attaches_is_looked_at_again(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, look = list[str](), route._problem

    def problem(endpoint: str) -> str:
        looked.append(endpoint)
        first_of_streams = len(set(looked)) == 2 and looked.count(endpoint) == 1
        return os.strerror(errno.ENOMEM) if first_of_streams else look(endpoint)

    monkeypatch.setattr(route, "_problem", problem)
    with ckptd.Client(places, transport="stream") as client:
        client.snapshot(1, state_of(1)).wait(timeout_s=60)
    assert len(set(looked)) == 2
    assert_saved(places, state_of(1), 1)


def test_a_state_is_changed_at_once_and_what_is_saved_is_what_it_was(places: Path) -> None:
    with ckptd.Client(places, transport="stream", slots=1) as client:
        state = state_of(6)
        before = {"weights": state["weights"].clone(), "number": 0}
        client.snapshot(1, state)
        state["weights"].zero_()
    assert_saved(places, before, 1)


@pytest.mark.slow
def test_a_daemon_killed_in_mid_stream_is_replaced_and_gets_all_of_it(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(20)
    with (
        ckptd.Client(places, transport="stream") as client,
        held_at(monkeypatch, 2) as (reached, go_on, sent),
    ):
        ticket = client.snapshot(1, state)
        assert reached.wait(60)
        assert ticket.sequence is None and ticket.state == "staged"
        end_daemon(places)
        assert not list(places.glob("default/step-*"))
        go_on.set()
        ticket.wait(timeout_s=60)
        assert sent.count(0) == 2  # from the start for the new daemon, which has nothing
        assert_saved(places, state, 1)
        assert [one.step for one in client.checkpoints()] == [1]


@pytest.mark.slow
def test_a_daemon_killed_after_it_has_all_of_a_snapshot_gets_it_again_and_it_is_committed_once(
    places: Path,
) -> None:
    for step in (1, 2, 3):
        with ckptd.Client(places, transport="stream", run=f"r{step}") as client:
            state = state_of(12, step)
            ticket = client.snapshot(step, state)
            eventually(lambda ticket=ticket: ticket.state and ticket.sequence is not None)
            end_daemon(places)
            ticket.wait(timeout_s=60)
            assert len(client.checkpoints()) == 1
        assert_saved(places, state, step, f"r{step}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [NoDaemon("this connection is lost"), zmq.ZMQError(errno.EMFILE)], ids=["lost", "no-fd"]
)
def test_a_stream_goes_on_where_it_was_when_its_connection_was_lost(
    places: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lost: list[int] = []

    def lose() -> None:
        if not lost:
            lost.append(1)
            raise error

    state = state_of(28)
    with (
        ckptd.Client(places, transport="stream") as client,
        held_at(monkeypatch, 3, lose) as (reached, go_on, sent),
    ):
        ticket = client.snapshot(1, state)
        assert reached.wait(60)

        def have() -> int:
            stream = status_of(client)["client"]["stream"]
            return int(stream["have"]) if stream else 0

        eventually(lambda: have() == 3 * MAX_FRAME_BYTES)
        go_on.set()
        ticket.wait(timeout_s=60)
        assert lost and sent.count(0) == 1 and sent == sorted(set(sent))
        assert_saved(places, state, 1)


@pytest.mark.slow
def test_a_piece_damaged_on_its_way_is_refused_and_sent_again(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, damaged = Connection.send, []

    def send(connection: Connection, message: Any, piece: memoryview | None = None) -> int:
        if piece is not None and len(damaged) < 2:
            damaged.append(1)
            piece = memoryview(bytes([piece[0] ^ 1]) + bytes(piece[1:]))
        return original(connection, message, piece)

    monkeypatch.setattr(Connection, "send", send)
    state = state_of(12)
    with ckptd.Client(places, transport="stream") as client:
        client.snapshot(1, state).wait(timeout_s=60)
    assert_saved(places, state, 1)
    assert "not the bytes that were sent" in (places / ".ckptd" / "daemon.log").read_text()


@pytest.mark.slow
def test_a_stopped_daemon_holds_up_neither_snapshot_nor_close_for_longer_than_their_bounds(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ckptd.Client(places, transport="stream", close_timeout_s=1.0, slots=1)
    client.reserve(state_of(20))
    record = daemon_of(places)
    assert record is not None
    with held_at(monkeypatch, 1) as (reached, go_on, _):
        client.snapshot(1, state_of(20))
        assert reached.wait(60)
        stop(record.pid)
        go_on.set()
        began = time.monotonic()
        with pytest.warns(CheckpointWarning, match="step 2 was skipped"), impatient(client, 0.5):
            client.snapshot(2, state_of(20, 2))
        with pytest.warns(CheckpointWarning) as said:
            client.close()
        assert time.monotonic() - began < 40
        assert any("step 1" in str(one.message) for one in said)
    os.kill(record.pid, signal.SIGCONT)
    assert not list(places.glob("default/step-*"))


@pytest.mark.slow
def test_two_clients_stream_at_once_while_a_third_uses_slots(places: Path) -> None:
    def train(run: str, transport: Any) -> None:
        with ckptd.Client(places, run=run, transport=transport) as client:
            for step in (1, 2, 3):
                client.snapshot(step, state_of(20, step))

    runs = {"one": "stream", "two": "stream", "three": "shm"}
    threads = [threading.Thread(target=train, args=run) for run in runs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for run in runs:
        for step in (1, 2, 3):
            assert_saved(places, state_of(20, step), step, run)


def test_an_older_snapshot_that_is_still_here_gives_way_to_a_newer_one(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StreamSender.withdraw

    def withdraw(sender: StreamSender, snapshot: int) -> bool:
        job = sender._jobs[snapshot]
        waiting = threading.Thread(target=lambda: (wait_until(lambda: job.over), go_on.set()))
        waiting.start()  # the thread finds that it is withdrawn
        try:
            return original(sender, snapshot)
        finally:
            waiting.join()

    monkeypatch.setattr(StreamSender, "withdraw", withdraw)
    monkeypatch.setattr(stream_sender, "_LET_GO_S", 60.0)  # however loaded the machine is
    monkeypatch.setattr(giving_way, "_ANSWER_S", 60.0)
    with (
        ckptd.Client(places, transport="stream", slots=2, on_busy="skip") as client,
        held_at(monkeypatch, 1) as (reached, go_on, _),
    ):
        first = client.snapshot(1, state_of(10, 1))
        assert reached.wait(60)
        second = client.snapshot(2, state_of(10, 2))  # the first is in mid-stream, this one waits
        with pytest.warns(CheckpointWarning, match="step 1 was superseded"):
            third = client.snapshot(3, state_of(10, 3))
        assert first.state == "superseded" and second.state in ("staged", "writing", "committed")
        third.wait(timeout_s=60)
    assert_saved(places, state_of(10, 3), 3)


def test_where_there_is_too_little_shared_memory_it_streams_and_says_so_once(
    places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ckptd.link import stages

    class Full(stages.Stages):
        def _reserve_slots(self, size: int, *others: Any) -> None:
            raise SharedMemoryTooSmall("no room for the slots", where="/dev/shm", todo="docker: --shm-size")

    monkeypatch.setattr("ckptd.link.daemon_link.Stages", Full)
    with caplog.at_level(logging.WARNING), ckptd.Client(places) as client:
        for step in (1, 2):
            client.snapshot(step, state_of(2, step)).wait(timeout_s=60)
    (said,) = [one.getMessage() for one in caplog.records if "transport.stream" in one.getMessage()]
    assert "/dev/shm" in said and "--shm-size" in said and "lost with this process" in said
    assert_saved(places, state_of(2, 2), 2)
    with (
        ckptd.Client(places, transport="shm") as client,
        pytest.raises(SharedMemoryTooSmall, match="--shm-size"),
    ):
        client.snapshot(3, state_of(2))


def test_a_forked_child_harms_no_stream(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ckptd.Client(places, transport="stream") as client,
        held_at(monkeypatch, 1) as (reached, go_on, _),
    ):
        state = state_of(9)
        ticket = client.snapshot(1, state)
        assert reached.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0 if ticket.state == "staged" else 1)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        ticket.wait(timeout_s=60)
    assert_saved(places, state, 1)


@pytest.mark.slow
def test_a_snapshot_that_the_daemon_has_no_memory_for_is_refused_and_the_next_one_is_saved(
    places: Path,
) -> None:
    with (
        detached(places, "--max-client-bytes", "6MB"),
        ckptd.Client(places, transport="stream", daemon="attach", slots=1) as client,
    ):
        ticket = client.snapshot(1, state_of(9))
        with pytest.raises(OverBudget, match="max_client_bytes"):
            ticket.wait(timeout_s=60)
        client.snapshot(2, state_of(3)).wait(timeout_s=60)
    assert_saved(places, state_of(3), 2)


def run_script(script: str, *args: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)], stdout=subprocess.PIPE, text=True
    )


KILLED = """
import os, sys, time, torch, ckptd
from ckptd.link.outgoing import Outgoing
original, sent = Outgoing.next_piece, []
def next_piece(outgoing):
    if len(sent) == 2:
        print("held", flush=True)
        time.sleep(600)
    piece = original(outgoing)
    sent.extend([1] if piece else [])
    return piece
Outgoing.next_piece = next_piece
client = ckptd.Client(sys.argv[1], run="killed", transport="stream")
client.snapshot(1, {"weights": torch.zeros(20_000_000, dtype=torch.uint8)})
time.sleep(600)
"""


@pytest.mark.slow
def test_what_a_killed_trainer_has_streamed_half_is_given_up_and_its_memory_freed(places: Path) -> None:
    with ckptd.Client(places) as client:  # the daemon stays
        with run_script(KILLED, places) as trainer:
            try:
                assert trainer.stdout is not None and trainer.stdout.readline() == "held\n"
                eventually(lambda: (status_of(client, "killed")["client"]["stream"] or {"have": 0})["have"])
                assert client.status()["memory"]["staged_bytes"] >= 20_000_000
            finally:
                trainer.kill()
        eventually(lambda: status_of(client, "killed")["client"] is None)
        eventually(lambda: client.status()["memory"]["staged_bytes"] == 0)
        assert client.drain(60) == 0
    assert not list(places.glob("killed/step-*"))


MEASURED = """
import sys, torch, ckptd
from ckptd.disk.rootdir import DaemonRecord, Root
def kib(pid, field):
    return next(int(line.split()[1]) for line in open(f"/proc/{pid}/status") if line.startswith(field))
state = {"weights": torch.randint(0, 255, (60 * 2**20,), dtype=torch.uint8)}
with ckptd.Client(sys.argv[1], transport="stream", slots=1) as client:
    client.snapshot(1, {"weights": torch.ones(100)}).wait()
    pids = "self", DaemonRecord.read(Root.for_reading(sys.argv[1])).pid
    for pid in pids:
        open(f"/proc/{pid}/clear_refs", "w").write("5")
    before = [kib(pid, "VmRSS") for pid in pids]
    for step in range(2, 6):
        client.snapshot(step, state)
    client.wait()
    print(*(kib(pid, "VmHWM") - rss for pid, rss in zip(pids, before)))
"""


@pytest.mark.slow
def test_memory_on_both_sides_is_the_state_and_what_credit_allows(places: Path) -> None:
    with run_script(MEASURED, places) as trainer:
        assert trainer.stdout is not None
        grown = [int(kib) / 1024 for kib in trainer.stdout.read().split()]
    assert trainer.returncode == 0 and len(grown) == 2
    for mib in grown:
        assert 55 < mib < 60 * 1.02 + MAX_CREDIT_BYTES / MIB + 32


@pytest.mark.slow
def test_a_script_that_ends_without_close_has_its_last_snapshot_streamed(places: Path) -> None:
    script = (
        "import sys, torch, ckptd\n"
        "client = ckptd.Client(sys.argv[1], transport='stream')\n"
        "client.snapshot(1, {'weights': torch.arange(3_000_000)})\n"
    )
    with run_script(script, places) as trainer:
        assert trainer.wait(60) == 0
    assert torch.equal(ckptd.load(places / "default" / "step-000000001")["weights"], torch.arange(3_000_000))


@pytest.mark.slow
def test_what_a_killed_daemon_had_taken_is_streamed_to_the_next_one_before_what_it_had_not(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ckptd.Client(places, transport="stream", close_timeout_s=60) as client,
        held_at(monkeypatch, 1) as (reached, go_on, _),
    ):
        client.reserve(state_of(2))
        daemon = daemon_of(places)
        assert daemon is not None
        stop(daemon.pid)
        older, newer = (client.snapshot(step, state_of(2, step)) for step in (1, 2))
        # As if the daemon had accepted it, and the thread had told so: only the newer one is still with it.
        client._writer._link.stages.streaming._sender.forget(older.snapshot)  # type: ignore[union-attr]
        os.kill(daemon.pid, signal.SIGKILL)
        go_on.set()
        client.wait(60)
        assert [one.step for one in client.checkpoints()] == [1, 2]
        assert older.committed and newer.committed and reached is not None
