"""daemon="off": the same series and lines, saved in the process itself, under the root's lock."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import read_series
from ckptd.errors import (
    CheckpointWarning,
    CkptdError,
    NoSpace,
    OutcomeUnknown,
    RestoreFailed,
    RootLocked,
    SaveFailed,
)
from ckptd.link import adoption, inline_writer, session
from ckptd.link.staging import Payload, fill
from ckptd.names import parse_work_folder, work_folder
from ckptd.snapshot.slots import Slot
from ckptd_places import daemon_of, places
from fake_daemon import wait_until
from locked_out import over_once_locked_out
from told_signals import stop

__all__ = ["places"]


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value)}


def test_a_snapshot_is_committed_when_the_call_returns_and_no_daemon_is_needed(root: Path) -> None:
    with ckptd.Client(root, daemon="off") as client:
        assert client.restore(state_of(0.0)) is None
        state = state_of(1.0)
        ticket = client.snapshot(4, state, metrics={"loss": 0.5})
        assert (ticket.state, ticket.sequence, ticket.error) == ("committed", 1, None)
        assert ticket.path == root / "default" / "step-000000004"
        state["weights"].fill_(9.0)
        assert client.drain() == 0
        client.wait()
        assert client.status()["daemon"] is None
        with pytest.raises(CkptdError, match="nobody verifies"):
            ticket.wait("verified")
        assert client.latest() is not None
    assert daemon_of(root) is None
    assert torch.equal(ckptd.load(ticket.path)["weights"], torch.full((1000,), 1.0))


def test_lines_and_sequences_go_on_over_clients_with_and_without_a_daemon(root: Path) -> None:
    with ckptd.Client(root, daemon="off") as client:
        for step in (1, 2, 3):
            client.snapshot(step, state_of(float(step)))
    with ckptd.Client(root, daemon="off") as client:
        state = state_of(0.0)
        resumed = client.restore(state, step=1)
        assert resumed is not None
        assert resumed.sequence == 1
        assert client.snapshot(2, state).sequence == 4
        assert client.snapshot(3, state).sequence == 5
    with ckptd.Client(root) as client:
        resumed = client.restore(state)
        assert resumed is not None
        assert (resumed.sequence, resumed.path.name) == (5, "step-000000003.2")
        assert client.snapshot(9, state).wait(timeout_s=30).sequence == 6


def test_an_earlier_step_restored_by_the_client_that_went_beyond_it_begins_a_new_line(root: Path) -> None:
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        for step in (1, 2, 3):
            client.snapshot(step, state)
        for _ in range(2):  # the second time too: it is the same checkpoint, and another line
            client.restore(state, step=1)
            client.snapshot(2, state)
            client.snapshot(3, state)
        assert [(one.step, one.sequence) for one in client.checkpoints()] == [(1, 1), (2, 6), (3, 7)]


def test_a_step_of_the_line_that_fails_is_never_replaced_by_an_abandoned_one_of_the_same_step(
    root: Path,
) -> None:
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        for step in (1, 2, 3):
            client.snapshot(step, state_of(float(step)))
        client.restore(state, step=1)
        path = client.snapshot(2, state).path
        assert path is not None
        (path / "ckpt.pt").write_bytes(b"")
        with pytest.warns(CheckpointWarning, match=path.name), pytest.raises(RestoreFailed):
            client.restore(state, step=2)
        resumed = client.restore(state, step=3)  # the line has no such step: an abandoned one was asked for
        assert resumed is not None and resumed.sequence == 3


@pytest.mark.slow
def test_the_root_is_locked_against_a_daemon_and_a_daemons_root_against_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptd.Client(root, daemon="off"), monkeypatch.context() as patch:
        over_once_locked_out(patch, session)
        with pytest.raises(RootLocked, match=r'daemon="off"'):
            ckptd.Client(root, start_timeout_s=100.0)
    with ckptd.Client(root), pytest.raises(RootLocked, match="pid"):
        ckptd.Client(root, daemon="off")


def test_a_client_that_could_not_open_leaves_the_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(inline_writer, "write_birth", fails)
        with pytest.raises(SaveFailed, match="Input/output"):
            ckptd.Client(root, daemon="off")
    ckptd.Client(root, daemon="off").close()


@pytest.mark.parametrize(
    ("error", "state"), [(NoSpace("the disk is full"), "failed"), (OutcomeUnknown("no answer"), "unknown")]
)
def test_a_failure_is_a_warning_and_the_next_snapshot_works(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: CkptdError, state: str
) -> None:
    def fails(
        run_dir: Path, descriptor: object, data: memoryview, position: object, *, writing: object
    ) -> None:
        part = data[:1]  # a view that this frame holds, as the real one does
        assert part
        raise error

    with ckptd.Client(root, daemon="off") as client:
        with monkeypatch.context() as patched:
            patched.setattr(inline_writer, "commit_snapshot", fails)
            with pytest.warns(CheckpointWarning, match=f"step 1 was not saved: {error.what}") as said:
                ticket = client.snapshot(1, state_of(1.0))
            assert ticket.state == state
            assert [warning.filename for warning in said] == [__file__]  # the caller's own line
        assert client.snapshot(2, state_of(2.0)).state == "committed"
        buffer = client._writer._buffer
    assert buffer.closed  # the error in the ticket doesn't keep the state's memory


def test_the_cadence_goes_on_from_the_checkpoint_that_was_restored(root: Path) -> None:
    with ckptd.Client(root, daemon="off", cadence=ckptd.Cadence(every_steps=4)) as client:
        steps = [step for step in range(1, 10) if client.maybe_snapshot(step, state_of(1.0))]
        assert steps == [1, 4, 8]
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off", cadence=ckptd.Cadence(every_steps=4)) as client:
        client.restore(state, step=1)
        assert client.maybe_snapshot(3, state) is None
        assert client.maybe_snapshot(5, state) is not None  # 4 was passed
    with ckptd.Client(root, daemon="off") as client:  # the default: every ten minutes, the first only once
        assert client.maybe_snapshot(6, state) is None


def test_what_a_killed_writer_left_is_cleared_away(root: Path) -> None:
    with ckptd.Client(root, daemon="off") as client:
        client.snapshot(1, state_of(1.0))
    for kind in ("tmp", "trash"):
        left = root / "default" / work_folder(kind, 7)
        left.mkdir()
        (left / "model.shard-000.pt").write_bytes(b"half")
    for folder in (root, root / ".ckptd", root / "default" / "decisions"):
        (folder / work_folder("tmp", 0)).write_bytes(b"half")
    foreign = root / "default" / ".tmp-notes"
    foreign.mkdir()
    with ckptd.Client(root, daemon="off") as client:
        names = {path.name for path in (root / "default").iterdir()}
        assert names == {"step-000000001", "decisions", ".tmp-notes"}
        assert not [path for path in root.rglob("*") if parse_work_folder(path.name)]
        # A sequence that was seen is never given again, though what carried it is gone.
        assert client.snapshot(2, state_of(2.0)).sequence == 8


def test_a_birth_that_can_not_be_read_is_not_followed_by_a_second_one(root: Path) -> None:
    with ckptd.Client(root, daemon="off") as client:
        client.snapshot(1, state_of(1.0))
    (birth,) = (root / "default" / "decisions").iterdir()
    birth.write_bytes(birth.read_bytes().replace(b"birth", b"berth"))
    with ckptd.Client(root, daemon="off") as client:
        client.snapshot(2, state_of(2.0))
        assert [one.step for one in client.checkpoints()] == [1, 2]
    assert list((root / "default" / "decisions").iterdir()) == [birth]


def test_the_sequence_of_a_snapshot_that_waits_in_shared_memory_is_not_given_again(root: Path) -> None:
    opened = Root.open(root, create=True)
    slot = Slot.create(opened.slot_dir() / f"slot-{'c1' * 16}-0-00000000", 64 * 1024)
    fill(slot, ("c1" * 16, "another"), 1, Payload(lambda memory: None, 0, b"descriptor"))
    slot.mark_writing(41)
    with ckptd.Client(root, daemon="off") as client:
        assert client.snapshot(1, state_of(1.0)).sequence == 42
    slot.close()
    slot.path.unlink()


def left_in_shared_memory(root: Path, ending: str) -> int:
    """A trainer whose daemon was killed before it wrote steps 7 and 8; the trainer's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            client = ckptd.Client(root)
            client.reserve(state_of(0.0))
            record = daemon_of(root)
            assert record is not None
            stop(record.pid)
            for step in (7, 8):
                client.snapshot(step, state_of(float(step)))
            os.kill(record.pid, signal.SIGKILL)
        finally:
            os.kill(os.getpid(), signal.Signals[ending])
    os.waitpid(pid, os.WUNTRACED)
    wait_until(lambda: daemon_of(root) is None)
    return pid


def test_what_a_killed_trainer_left_in_shared_memory_is_written_before_anything_else(root: Path) -> None:
    left_in_shared_memory(root, "SIGKILL")
    with ckptd.Client(root, daemon="off") as client:
        on_line = [
            (e.step, e.sequence, e.on_line) for e in read_series(Root.for_reading(root), "default").entries
        ]
        assert on_line == [(7, 1, True), (8, 2, True)]
        state = state_of(0.0)
        resumed = client.restore(state)
        assert resumed is not None and (resumed.step, resumed.staged) == (8, False)
        assert torch.equal(state["weights"], state_of(8.0)["weights"])
        assert client.snapshot(9, state).sequence == 3
        assert not Root.for_reading(root).slot_path.exists()


def test_what_a_living_trainer_has_sealed_is_said_and_left_to_it(root: Path) -> None:
    pid = left_in_shared_memory(root, "SIGSTOP")
    try:
        with pytest.warns(CheckpointWarning, match=rf"pid {pid}"):
            client = ckptd.Client(root, daemon="off")
        assert client.snapshot(1, state_of(1.0)).committed
        client.close()
        assert len(list(Root.for_reading(root).slot_path.glob("slot-*"))) == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_can_not_be_written_now_stays_in_shared_memory_and_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_in_shared_memory(root, "SIGKILL")

    def fails(*_: object, **_how: object) -> None:
        raise NoSpace("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(adoption, "commit_snapshot", fails)
        with pytest.warns(CheckpointWarning, match="the disk is full"):
            ckptd.Client(root, daemon="off").close()
    with ckptd.Client(root, daemon="off") as client:
        assert [one.step for one in client.checkpoints()] == [7, 8]


def test_a_snapshot_that_was_committed_before_its_slot_was_freed_is_not_written_again(root: Path) -> None:
    left_in_shared_memory(root, "SIGKILL")
    slots = sorted(Root.for_reading(root).slot_path.glob("slot-*"))
    copies = {path: path.read_bytes() for path in slots}
    ckptd.Client(root, daemon="off").close()
    Root.for_reading(root).slot_dir()
    for path, copy in copies.items():
        path.touch(0o600)
        path.write_bytes(copy)
    with ckptd.Client(root, daemon="off") as client:
        assert [one.step for one in client.checkpoints()] == [7, 8]
    assert not Root.for_reading(root).slot_path.exists()


def test_there_is_nobody_to_stream_to(root: Path) -> None:
    with pytest.raises(
        ckptd.InvalidArgument, match=r'transport: .*stream.*wanted a daemon: with daemon="off"'
    ):
        ckptd.Client(root, daemon="off", transport="stream")
