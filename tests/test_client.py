"""The client with a real daemon: the three lines, resuming, lines, a daemon that dies under it."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import (
    BadRoot,
    CheckpointGone,
    CheckpointWarning,
    ClientClosed,
    CorruptCheckpoint,
    InvalidArgument,
    NothingThere,
    RestoreFailed,
    RunTaken,
    StateMismatch,
    TimedOut,
)
from ckptd.format.records import read_index
from ckptd.link import resume, session
from ckptd.link.autostart import DaemonStart
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_places import daemon_of, end_daemon, places
from fake_daemon import wait_until
from told_signals import stop

__all__ = ["places"]


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def daemon(root: Path) -> DaemonRecord:
    record = daemon_of(root)
    assert record is not None
    return record


def make(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "train": ckptd.TrainState()}


def train(state: dict[str, Any], step: int) -> float:
    """One step whose loss depends on every generator and on the whole state."""
    x = torch.randn(4, 8) + float(np.random.rand()) + random.random()
    loss = state["model"](x).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["train"].step = step
    state["train"].losses.append(loss.item())
    return loss.item()


# --- the main path --------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_lines_save_and_resume_bit_for_bit(root: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    whole = make(1)
    with ckptd.Client(root=root, cadence=ckptd.Cadence(every_steps=4)) as client:
        assert client.restore(whole) is None
        for step in range(1, 11):
            train(whole, step)
            client.maybe_snapshot(step, whole)

    random.seed(99)
    again = make(99)
    with ckptd.Client(root=root, cadence=ckptd.Cadence(every_steps=4)) as client:
        resumed = client.restore(again)
        assert resumed is not None
        assert (resumed.step, resumed.next_step, resumed.path.name) == (8, 9, "step-000000008")
        assert (resumed.passed_over, resumed.missing, resumed.unused) == ((), (), ())
        for step in range(resumed.next_step, 11):
            train(again, step)
    assert again["train"].losses == whole["train"].losses
    assert [entry.step for entry in client.checkpoints()] == [1, 4, 8]  # 1: the first one of a fresh run


def test_a_ticket_tells_the_way_to_verified(root: Path) -> None:
    with ckptd.Client(root=root) as client:
        ticket = client.snapshot(
            3,
            make(),
            metrics={
                "loss": np.float32(0.5),
                "acc": torch.tensor(0.25, requires_grad=True),
                "nan": float("nan"),
            },
        )
        assert ticket.wait("verified", timeout_s=60).state == "verified"
        assert ticket.path == root / "default" / "step-000000003"
        assert ticket.sequence == 1
        latest = client.latest()
        assert latest is not None
        assert (latest.path, latest.metrics["loss"], latest.metrics["acc"]) == (ticket.path, 0.5, 0.25)
        best = client.best("loss", "min")
        assert best is not None
        assert best.path == ticket.path
        assert client.drain(30, verified=True) == 0
        assert client.status()["schema"] == "ckpt.v2-status"


def test_two_runs_of_one_root_share_a_daemon(root: Path) -> None:
    with ckptd.Client(root, run="a") as a, ckptd.Client(root, run="b") as b:
        a.snapshot(1, make(1))
        b.snapshot(2, make(2))
        a.wait(60)
        b.wait(60)
        assert [one.step for one in a.checkpoints()] == [1]
        assert [one.step for one in b.checkpoints()] == [2]


def test_clean_exits_leave_no_shared_memory(root: Path) -> None:
    with ckptd.Client(root) as client:
        client.snapshot(1, make())
        folder = Root.for_reading(root).slot_path
        assert len(list(folder.glob("slot-*"))) == 2
    assert list(folder.glob("slot-*")) == []


# --- restoring ------------------------------------------------------------------------------------


def saved(root: Path, *steps: int) -> list[Path]:
    paths = []
    with ckptd.Client(root) as client:
        for step in steps:
            state = make(step)
            state["train"].step = step
            path = client.snapshot(step, state).wait(timeout_s=60).path
            assert path is not None
            paths.append(path)
    return paths


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_newest_checkpoint_is_passed_over_with_the_reason(root: Path) -> None:
    paths = saved(root, 1, 2, 3)
    end_daemon(root)
    flip(paths[2] / "ckpt.pt")
    state = make(50)
    with ckptd.Client(root) as client:
        with pytest.warns(CheckpointWarning, match=r"step-000000003.*is passed over.*sha256"):
            resumed = client.restore(state)
        assert resumed is not None
        assert (resumed.step, state["train"].step) == (2, 2)
        assert [one.name for one in resumed.passed_over] == ["step-000000003"]
        client.snapshot(3, state).wait(timeout_s=60)


def test_when_all_are_damaged_it_is_an_error_and_the_state_is_untouched(root: Path) -> None:
    paths = saved(root, 1, 2)
    end_daemon(root)
    (paths[0] / "index.json").unlink()
    flip(paths[1] / "ckpt.pt")
    state = make(50)
    before = [p.clone() for p in state["model"].parameters()]
    with ckptd.Client(root, daemon="off") as client, pytest.warns(CheckpointWarning):
        with pytest.raises(RestoreFailed, match="step-000000002") as caught:
            client.restore(state)
        assert not caught.value.state_touched
    assert all(torch.equal(a, b) for a, b in zip(before, state["model"].parameters(), strict=True))


def test_a_checkpoint_that_retention_removes_while_it_is_read_leads_to_a_new_listing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = saved(root, 1, 2, 3)
    end_daemon(root)
    aside = root / "aside"
    paths[2].rename(aside)
    real, gone = resume.opened, []

    def load(path: Path, **options: Any) -> Any:
        if not gone:
            gone.append(path.name)
            shutil.rmtree(path)
            aside.rename(paths[2])  # its successor is there: the older ones listed before aren't the newest
            raise CheckpointGone("deleted", where=str(path))
        return real(path, **options)

    monkeypatch.setattr(resume, "opened", load)
    state = make(50)
    with ckptd.Client(root, daemon="off") as client:
        resumed = client.restore(state)
        assert resumed is not None
        assert (gone, resumed.step, resumed.passed_over) == (["step-000000002"], 3, ())


def test_an_earlier_step_begins_a_line_of_its_own(root: Path) -> None:
    saved(root, 1, 2, 3)
    state = make(50)
    with ckptd.Client(root) as client:
        resumed = client.restore(state, step=1)
        assert resumed is not None
        assert resumed.step == 1
        path = client.snapshot(2, state).wait("verified", timeout_s=60).path
        assert path is not None
        assert (read_index(path).parent, read_index(path).lineage) == (1, ((1, 1), (4, 4)))
        latest = client.latest()
        assert latest is not None
        assert latest.name == "step-000000002.2"
        with pytest.raises(NothingThere, match="step 77"):
            client.restore(state, step=77)


def test_a_checkpoint_of_another_run_is_restored_by_path(root: Path) -> None:
    (path,) = saved(root, 5)
    state = make(50)
    with ckptd.Client(root, run="other") as client:
        resumed = client.restore(state, source=path)
        assert resumed is not None
        assert (resumed.step, resumed.sequence) == (5, None)
        with pytest.raises(NothingThere):
            client.restore(state, source=root / "nowhere")
        with pytest.raises(InvalidArgument, match="exclude each other"):
            client.restore(state, source=path, step=5)
        flip(path / "ckpt.pt")
        with pytest.raises(CorruptCheckpoint):
            client.restore(state, source=path)


def test_only_what_is_named_is_restored_and_what_is_missing_is_said(root: Path) -> None:
    saved(root, 5)
    state = make(50)
    optimizer = state["optimizer"].state_dict()
    with ckptd.Client(root) as client:
        resumed = client.restore(state, only=["train"])
        assert resumed is not None
        assert state["train"].step == 5
        assert state["optimizer"].state_dict() == optimizer
        larger = {**make(51), "scheduler": ckptd.TrainState()}
        with pytest.raises(StateMismatch, match="scheduler"):
            client.restore(larger)
        resumed = client.restore(larger, strict=False)
        assert resumed is not None
        assert any("scheduler" in name for name in resumed.missing)


# --- the daemon dies, the client dies ---------------------------------------------------------------


def test_a_killed_daemon_is_replaced_and_nothing_accepted_is_lost(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make()
    with ckptd.Client(root, cadence=ckptd.Cadence(every_steps=1000)) as client:
        client.restore(state)
        first = daemon(root).pid
        stop(first)  # so that both lie sealed and unwritten when it dies
        tickets = [client.snapshot(step, state) for step in (1, 2)]
        os.kill(first, signal.SIGKILL)
        tickets += [client.snapshot(step, state) for step in (3, 4, 5)]
        client.wait(60)
        assert [ticket.state in ("committed", "verified") for ticket in tickets] == [True] * 5
        assert daemon(root).pid != first
        assert [one.step for one in client.checkpoints()] == [1, 2, 3, 4, 5]
        assert client.drain(60, verified=True) == 0
        told = [record.getMessage() for record in caplog.records if record.name == session.__name__]
        lost, recovered = told  # at the level of warnings: what nobody set up logging for shows
        assert f"pid {first} is gone; another one is started by itself" in lost and "ckptd start" not in lost
        assert f"session.recovered run=default pid={daemon(root).pid}" in recovered


@pytest.mark.slow
def test_a_daemon_that_dies_between_two_snapshots_is_replaced_by_maybe_snapshot_without_a_wait(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make()
    with ckptd.Client(root, cadence=ckptd.Cadence(every_steps=10**6)) as client:
        client.snapshot(1, state).wait(timeout_s=60)
        end_daemon(root)
        stopped: list[int] = []  # the next daemon isn't there before it may
        with monkeypatch.context() as patch:
            spawn = DaemonStart._spawn

            def spawned(start: DaemonStart) -> None:
                spawn(start)
                assert start._process is not None
                os.kill(start._process.pid, signal.SIGSTOP)
                stopped.append(start._process.pid)

            patch.setattr(DaemonStart, "_spawn", spawned)
            wait_until(lambda: client.maybe_snapshot(2, state) is None and bool(stopped))
            began = time.monotonic()
            for step in range(3, 13):
                assert client.maybe_snapshot(step, state) is None
            assert time.monotonic() - began < 25  # a single wait for a daemon would be 30 s
        assert len(stopped) == 1
        assert daemon_of(root) is None
        os.kill(stopped[0], signal.SIGCONT)
        wait_until(
            lambda: client.maybe_snapshot(13, state) is None and client._writer._link.session.epoch == 2
        )
        assert client.snapshot(14, state).wait(timeout_s=60).committed


def test_a_client_that_was_killed_leaves_its_snapshot_for_the_next_one(root: Path) -> None:
    """A child process stages a snapshot while the daemon is stopped, and both are killed."""
    saved(root, 1)
    pid = os.fork()
    if pid == 0:
        try:
            client = ckptd.Client(root)
            state = make(7)
            client.reserve(state)
            record = daemon(root)
            stop(record.pid)
            state["train"].step = 7
            client.snapshot(7, state)
            os.kill(record.pid, signal.SIGKILL)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    state = make(50)
    with ckptd.Client(root) as client:
        resumed = client.restore(state)
        assert resumed is not None
        assert (resumed.step, state["train"].step) == (7, 7)


@pytest.mark.slow
def test_twenty_times_trainer_and_daemon_killed_lose_no_sealed_snapshot_and_no_shared_memory(
    root: Path,
) -> None:
    luck = random.Random(5)
    last = 0
    for _ in range(20):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                client = ckptd.Client(root)
                state = make(1)
                client.restore(state)
                for step in range(last + 1, last + 1000):
                    state["train"].step = step
                    client.snapshot(step, state)
                    os.write(writing, b"%d\n" % step)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.close(writing)
        with os.fdopen(reading, "rb") as told:
            told.readline()  # it has begun to save
            time.sleep(luck.uniform(0.0, 0.2))
            os.kill(pid, signal.SIGKILL)
            end_daemon(root)
            last += len(told.readlines()) + 1
        os.waitpid(pid, 0)
        with ckptd.Client(root) as client:
            state = make(2)
            resumed = client.restore(state)
            assert resumed is not None
            # The step after the last one that was told may have been sealed just before the kill.
            assert resumed.step in (last, last + 1)
            assert state["train"].step == resumed.step
            assert resumed.passed_over == ()
            last = resumed.step
        assert list(Root.for_reading(root).slot_path.glob("slot-*")) == []


@pytest.mark.slow
def test_a_stopped_daemon_holds_the_exit_no_longer_than_the_bound(root: Path) -> None:
    state = make()
    client = ckptd.Client(root, close_timeout_s=0.5)
    client.reserve(state)
    record = daemon(root)
    stop(record.pid)
    try:
        ticket = client.snapshot(1, state)
        began = time.monotonic()
        with pytest.warns(CheckpointWarning, match="step 1"):
            client.close()
        assert time.monotonic() - began < 40
        assert ticket.state == "unknown"
    finally:
        os.kill(record.pid, signal.SIGCONT)
    wait_until(lambda: (root / "default" / "step-000000001").exists())  # sealed means it is written


# --- usage ----------------------------------------------------------------------------------------


def test_a_second_live_client_of_a_run_is_refused_by_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LEAVING_CLIENT_S", 0.2)
    with ckptd.Client(root), pytest.raises(RunTaken, match=r"this process already.*close\(\)"):
        ckptd.Client(root)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"run": "../x"}, "run"), ({"daemon": "yes"}, "daemon"), ({"slots": 3}, "slots"), ({"slots": True},
    "slots"),
     ({"on_busy": "panic"}, "on_busy"), ({"on_error": "ignore"}, "on_error"), ({"sharding": 4}, "sharding"),
     ({"cadence": 500}, "cadence"), ({"busy_timeout_s": float("inf")}, "busy_timeout_s"),
     ({"close_timeout_s": -1}, "close_timeout_s"), ({"start_timeout_s": None}, "start_timeout_s")],
    ids=str,
)  # fmt: skip
def test_an_argument_that_cannot_be_right_is_refused_and_nothing_is_made(
    root: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        ckptd.Client(root, **options)
    assert not root.exists()


def test_a_root_that_is_a_file_is_refused(root: Path) -> None:
    root.write_text("")
    with pytest.raises(BadRoot):
        ckptd.Client(root)


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", 10**16])
def test_a_bad_step_is_refused(root: Path, step: Any) -> None:
    with ckptd.Client(root, daemon="off") as client:
        with pytest.raises(InvalidArgument):
            client.snapshot(step, make())
        with pytest.raises(InvalidArgument):
            client.maybe_snapshot(step, make())


@pytest.mark.parametrize(
    "metrics", [{"a": "1"}, {"a": None}, {1: 1.0}, {"": 1.0}, [1], {"a": torch.ones(2)}], ids=str
)
def test_a_bad_metric_is_refused(root: Path, metrics: Any) -> None:
    with ckptd.Client(root, daemon="off") as client, pytest.raises(InvalidArgument, match="metrics"):
        client.snapshot(1, make(), metrics=metrics)


def test_a_closed_client_says_so_and_closes_twice(root: Path) -> None:
    client = ckptd.Client(root, daemon="off")
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        client.snapshot(1, make())
    assert "closed" in repr(client)


@pytest.mark.slow
def test_two_hundred_snapshots_keep_descriptors_and_shared_memory_flat(root: Path) -> None:
    state = make()

    def use() -> tuple[int, int]:
        gc.collect()  # what other tests have left isn't this one's
        return len(os.listdir("/proc/self/fd")), len(list(Root.for_reading(root).slot_path.iterdir()))

    with ckptd.Client(root) as client:
        client.snapshot(0, state).wait(timeout_s=60)
        descriptors, slots = use()
        for step in range(1, 201):
            client.snapshot(step, state)
        client.wait(60)
        assert use()[0] <= descriptors and use()[1] == slots


def test_waiting_has_a_bound_that_must_be_finite(root: Path) -> None:
    with ckptd.Client(root, daemon="off") as client:
        with pytest.raises(InvalidArgument, match="timeout_s"):
            client.wait(float("inf"))
        assert issubclass(TimedOut, TimeoutError)


def test_a_notice_lost_with_the_daemon_is_made_up_for_from_disk(root: Path) -> None:
    with ckptd.Client(root) as starter:
        starter.drain()
        client = ckptd.Client(root, run="second", daemon="attach")
        try:
            ticket = client.snapshot(1, {"a": torch.ones(10)})
            folder = root / "second" / "step-000000001"
            slots = [Slot.open(path) for path in Path(os.environ["CKPTD_SHM_DIR"]).rglob("slot-*")]
            wait_until(
                lambda: folder.is_dir() and all(slot.header().state == SlotState.FREE for slot in slots)
            )
            for slot in slots:
                slot.close()
            end_daemon(root)  # and with it what its socket had sent and nobody had read
            assert ticket.wait("committed", timeout_s=60).path == folder
        finally:
            client.close()


def test_a_run_with_only_abandoned_checkpoints_is_no_fresh_start(root: Path) -> None:
    state = make()
    with ckptd.Client(root, daemon="off") as client:
        for step in (1, 2):
            client.snapshot(step, state)
    with ckptd.Client(root, daemon="off") as client:
        client.restore(state, step=1)
        client.snapshot(3, state)
    for step in (1, 3):
        shutil.rmtree(root / "default" / f"step-{step:09d}")
    shutil.copytree(root / "default" / "step-000000002", root / "default" / "step-000000003")
    (root / "default" / "step-000000003" / "index.json").unlink()
    with (
        ckptd.Client(root, daemon="off") as client,
        pytest.warns(CheckpointWarning),
        pytest.raises(RestoreFailed),
    ):
        client.restore(state)


def test_a_snapshot_that_an_earlier_daemon_committed_keeps_its_sequence(root: Path) -> None:
    with ckptd.Client(root) as client:
        client.snapshot(1, {"a": torch.ones(10)}).wait()
        ticket = client.snapshot(2, {"a": torch.ones(10)})
        folder = root / "default" / "step-000000002"
        slots = [Slot.open(path) for path in Path(os.environ["CKPTD_SHM_DIR"]).rglob("slot-*")]
        wait_until(lambda: folder.is_dir() and all(slot.header().state == SlotState.FREE for slot in slots))
        for slot in slots:
            slot.close()
        end_daemon(root)  # the notice is lost with it, and the next one has to look on disk
        ticket.wait("verified", timeout_s=60)
        assert ticket.sequence == read_index(folder).sequence == 2
