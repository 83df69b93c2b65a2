"""Warm starts: a state from elsewhere begins a line of its own in the run it is restored into."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.commit import Committed
from ckptd.disk.rootdir import Root
from ckptd.disk.series import Series, candidates, latest_valid, read_series
from ckptd.errors import CheckpointWarning, NoValidCheckpoint, ReadFailed, RestoreFailed, SaveFailed
from ckptd.format.records import CheckpointIndex, read_index
from ckptd.link import inline_writer, recorder
from ckptd_places import daemon_of, end_daemon, places
from fake_daemon import wait_until
from live_daemon import ckptd as command
from live_daemon import detached
from made_series import Made
from run_damage import flip
from snapshots import Writer
from told_signals import stop
from unreadable_disk import unreadable

__all__ = ["places"]

OWN = ["step-000000001", "step-000000002", "step-000000003"]


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value)}


def saved(root: Path, *steps: int, run: str = "default") -> None:
    with ckptd.Client(root, run, daemon="off") as client:
        for step in steps:
            client.snapshot(step, state_of(float(step)))


def elsewhere(tmp_path: Path, step: int = 50) -> Path:
    """A checkpoint of no run."""
    return ckptd.save(tmp_path / f"pretrained-{step}", state_of(float(step)), step=step)


def series(root: Path) -> Series:
    return read_series(Root.for_reading(root), "default")


def on_line(root: Path) -> list[str]:
    return [entry.name for entry in reversed(candidates(series(root)))]


def v1_file(tmp_path: Path) -> Path:
    path = tmp_path / "old" / "ckpt.pt"
    path.parent.mkdir()
    payload = {
        "schema": "ckpt.v1", "model": {"w": torch.ones(2)}, "optimizer": {}, "scheduler": {},
        "state": {"step": 50, "epoch": 0, "batch_in_epoch": 0, "losses": []}, "rng": None, "wall_saved_at": 0.0,
    }  # fmt: skip
    torch.save(payload, path)
    return path


# --- without a daemon -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["saved by itself", "another run"])
def test_a_warm_start_leaves_the_runs_own_line_and_begins_another(
    root: Path, tmp_path: Path, where: str
) -> None:
    saved(root, 1, 2, 3)
    saved(root, 50, run="other")
    source = elsewhere(tmp_path) if where == "saved by itself" else root / "other" / "step-000000050"
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        resumed = client.restore(state, source=source)
        assert resumed is not None and resumed.sequence is None
        assert on_line(root) == OWN  # restoring alone moves nothing
        for step in (51, 52):
            client.snapshot(step, state)
    first, second = (read_index(root / "default" / f"step-0000000{step}") for step in (51, 52))
    assert (first.sequence, first.parent, first.lineage) == (4, None, ((4, 4),))
    assert (second.parent, second.lineage) == (4, ((4, 5),))
    assert on_line(root) == ["step-000000051", "step-000000052"]
    assert [(fork.sequence, fork.parent) for fork in series(root).decisions.forks] == [(4, None)]
    listed = command("list", "--root", root, "--run", "default").stdout.splitlines()
    assert [line.split("\t")[1] for line in listed if "abandoned" in line] == OWN


def counted(value: float) -> dict[str, Any]:
    return state_of(value) | {"train": {"step": int(value)}}


@pytest.mark.parametrize("only", [["weights"], ["weights", "rng"]])
def test_a_warm_start_of_a_part_trains_from_the_first_step(
    root: Path, tmp_path: Path, only: list[str]
) -> None:
    """The loop of the README began at the pretrained step: where that was high, it trained nothing."""
    pretrained = ckptd.save(tmp_path / "pretrained", counted(5.0), step=1000)
    for first in (1, 3):
        state = counted(0.0)
        with ckptd.Client(root, daemon="off") as client:
            resumed = client.restore(state) or client.restore(state, source=pretrained, only=only)
            assert resumed is not None
            assert resumed.next_step == first
            client.snapshot(2, state)


@pytest.mark.parametrize("only", [None, ["weights", "train"]])
def test_a_warm_start_of_all_goes_on_from_its_step(
    root: Path, tmp_path: Path, only: list[str] | None
) -> None:
    pretrained = ckptd.save(tmp_path / "pretrained", counted(5.0), step=1000)
    with ckptd.Client(root, daemon="off") as client:
        resumed = client.restore(counted(0.0), source=pretrained, only=only)
    assert resumed is not None
    assert resumed.next_step == 1001


def test_a_warm_start_from_a_file_of_format_v1_begins_a_line_too(root: Path, tmp_path: Path) -> None:
    saved(root, 1, 2, 3)
    state: dict[str, Any] = {"model": torch.nn.ParameterDict({"w": torch.zeros(2)})}
    with ckptd.Client(root, daemon="off") as client:
        assert client.restore(state, source=v1_file(tmp_path), only=["model"]) is not None
        client.snapshot(51, state)
    assert on_line(root) == ["step-000000051"]


def test_a_source_that_is_one_of_the_runs_own_is_gone_on_from(root: Path) -> None:
    saved(root, 1, 2, 3)
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        client.restore(state, source=root / "default" / "step-000000002")
        client.snapshot(3, state)
    assert read_index(root / "default" / "step-000000003.2").lineage == ((1, 2), (4, 4))
    assert on_line(root) == [*OWN[:2], "step-000000003.2"]


def test_a_copy_of_the_run_that_went_another_way_is_another_run(root: Path, tmp_path: Path) -> None:
    saved(root, 1, 2)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    for each in (root, copy):
        saved(each, 3)  # sequence 3 of both, and not one state
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        shared = client.restore(state, source=copy / "default" / OWN[1])
        assert shared is not None and shared.sequence == 2  # from before the copy: the same checkpoint
        other = client.restore(state, source=copy / "default" / OWN[2])
        assert other is not None and other.sequence is None
        client.snapshot(4, state)
    assert on_line(root) == ["step-000000004"]


def test_whoever_restores_nothing_goes_on_from_the_head(root: Path) -> None:
    saved(root, 1, 2, 3)
    saved(root, 4)
    assert on_line(root) == [*OWN, "step-000000004"]


@pytest.mark.parametrize("what", ["the first", "all"])
def test_a_fall_back_after_a_warm_start_never_goes_to_what_it_replaced(
    root: Path, tmp_path: Path, what: str
) -> None:
    saved(root, 1, 2, 3)
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        client.restore(state, source=elsewhere(tmp_path))
        client.snapshot(51, state)
        client.snapshot(52, state)
    flip(root / "default" / "step-000000052" / "ckpt.pt")
    if what == "the first":
        assert latest_valid(root).name == "step-000000051"  # type: ignore[union-attr]
        return
    flip(root / "default" / "step-000000051" / "ckpt.pt")
    with pytest.raises(NoValidCheckpoint):
        latest_valid(root)
    with (
        ckptd.Client(root, daemon="off") as client,
        pytest.warns(CheckpointWarning, match="passed over"),
        pytest.raises(RestoreFailed),
    ):
        client.restore(state)
    assert set(state["weights"].tolist()) == {50.0}


def test_a_lost_first_checkpoint_of_the_line_brings_nothing_back(root: Path, tmp_path: Path) -> None:
    writer = Writer(root)
    for step in (1, 2, 3):
        writer.commit(step)
    first = writer.commit(51, client_id="ef" * 16, begins_line=True)
    first.path.rename(first.path.with_name(".trash-000000000004-" + "ab" * 16))
    second = writer.commit(52, client_id="ef" * 16, begins_line=True)
    assert (second.index.parent, second.index.lineage) == (None, ((5, 5),))
    shutil.rmtree(second.path)
    assert not any(entry.on_line for entry in read_series(writer.root, "default").entries)


def test_a_client_that_starts_warm_again_begins_another_line(root: Path, tmp_path: Path) -> None:
    state, source = state_of(0.0), elsewhere(tmp_path)
    with ckptd.Client(root, daemon="off") as client:
        for step in (1, 2):
            client.snapshot(step, state)
        for step in (51, 61):
            client.restore(state, source=source)
            client.snapshot(step, state)
            client.snapshot(step + 1, state)
    assert on_line(root) == ["step-000000061", "step-000000062"]


def test_an_unreadable_head_does_not_keep_a_warm_start_from_being_saved(root: Path) -> None:
    made = Made(root)
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    made.catalogue.write_index()
    later: dict[str, Any] = {"client_id": "d" * 32, "begins_line": True, "base_snapshot": 3}
    with unreadable(errno.EIO, made.dir / OWN[2]):
        made.reopen()
        done = made.commit(51, verify=True, **later)
        assert (done.index.parent, done.index.lineage) == (None, ((4, 4),))
    made.catalogue.write_index()
    with unreadable(errno.EIO, done.path), pytest.raises(SaveFailed, match="can't be told"):
        made.reopen()
        made.commit(52, **later)  # what it goes on from is just the one that can't be read


def test_a_sequence_that_may_be_that_of_an_unreadable_one_is_not_given_to_a_warm_start(root: Path) -> None:
    writer = Writer(root)
    for step in (1, 2, 3):
        writer.commit(step)
    with unreadable(errno.EIO, writer.run_dir / OWN[2]), pytest.raises(SaveFailed, match="can't be told"):
        writer.commit(51, client_id="ef" * 16, begins_line=True, snapshot=7, base_snapshot=6)


def test_a_writer_killed_before_the_commit_leaves_the_run_as_it_was(root: Path, tmp_path: Path) -> None:
    """SIGKILL when the fork is recorded and the checkpoint isn't: nothing of the new line is on disk."""
    saved(root, 1, 2, 3)
    source = elsewhere(tmp_path)

    def dies(*args: Any, **more: Any) -> Committed:
        from ckptd.disk.decisions import write_fork

        position = args[3]
        assert position.forks
        write_fork(args[0], position.sequence, position.parent, "step-000000051")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def child() -> None:
        inline_writer.commit_snapshot = dies
        with ckptd.Client(root, daemon="off") as client:
            state = state_of(0.0)
            client.restore(state, source=source)
            client.snapshot(51, state)

    in_process(child)
    assert on_line(root) == OWN
    assert latest_valid(root).name == OWN[2]  # type: ignore[union-attr]
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off") as client:
        client.restore(state, source=source)
        client.snapshot(51, state)
    assert on_line(root) == ["step-000000051"]


# --- with a daemon --------------------------------------------------------------------------------


def in_process(act: Callable[[], None]) -> None:
    """Run it in another process, which must die of SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            act()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_daemon_removes_the_line_before_only_once_the_new_one_is_verified(
    root: Path, tmp_path: Path
) -> None:
    saved(root, 1, 2, 3)
    state, source = state_of(0.0), elsewhere(tmp_path)
    with detached(root, "--keep-last", "1"), ckptd.Client(root, daemon="attach") as client:
        client.restore(state, source=source)
        assert client.latest().name == OWN[2]  # type: ignore[union-attr]
        ticket = client.snapshot(51, state)
        ticket.wait("verified", timeout_s=30)
        assert ticket.path is not None
        assert read_index(ticket.path).lineage == ((4, 4),)
        wait_until(lambda: [p.name for p in (root / "default").glob("step-*")] == ["step-000000051"])
        assert client.latest().name == "step-000000051"  # type: ignore[union-attr]


def test_a_warm_start_sealed_before_trainer_and_daemon_were_killed_is_adopted_as_a_line(
    root: Path, tmp_path: Path
) -> None:
    saved(root, 1, 2, 3)
    source = elsewhere(tmp_path)

    def child() -> None:
        client = ckptd.Client(root)
        state = state_of(0.0)
        client.restore(state, source=source)
        record = daemon_of(root)
        assert record is not None
        stop(record.pid)
        client.snapshot(51, state)
        client.snapshot(52, state)
        os.kill(record.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    in_process(child)
    end_daemon(root)
    assert on_line(root) == OWN
    with detached(root, "--keep-last", "9"):
        wait_until(lambda: (root / "default" / "step-000000052").exists())
        said = command("latest", "--root", root, "--run", "default")
        assert said.stdout.strip() == str(root / "default" / "step-000000052"), said.stderr
        state = state_of(0.0)
        with ckptd.Client(root, daemon="attach") as client:
            resumed = client.restore(state)
            assert resumed is not None
            assert (resumed.step, set(state["weights"].tolist())) == (52, {50.0})
        listed = json.loads(command("list", "--root", root, "--run", "default", "--json").stdout)
    on = {one["name"]: one["on_line"] for one in listed["runs"][0]["checkpoints"]}
    assert on["step-000000051"] and on["step-000000052"]
    assert not any(on.get(name) for name in OWN)
    first, second = (read_index(root / "default" / f"step-0000000{step}") for step in (51, 52))
    assert (first.parent, first.lineage) == (None, ((4, 4),))
    assert (second.parent, second.lineage) == (4, ((4, 5),))


# --- seconds and cadence --------------------------------------------------------------------------


def long_run(root: Path, seconds: float) -> CheckpointIndex:
    """A run whose head was trained for so long."""
    writer = Writer(root)
    writer.commit(1, run_seconds=seconds / 2)
    return writer.commit(2, run_seconds=seconds).index


def seconds_of_next(client: ckptd.Client, step: int) -> float:
    path = client.snapshot(step, state_of(1.0)).path
    assert path is not None
    return read_index(path).run_seconds


def test_run_seconds_go_on_from_what_was_restored_or_from_the_head(root: Path) -> None:
    long_run(root, 5000.0)
    with ckptd.Client(root, daemon="off") as client:
        assert 5000.0 <= seconds_of_next(client, 3) < 5100.0  # restored nothing: the head's
        assert 5000.0 <= seconds_of_next(client, 4) < 5100.0  # and not its own on top
    state: dict[str, Any] = {}
    with ckptd.Client(root, daemon="off") as client:
        client.restore(state, step=1, strict=False)
        assert 2500.0 <= seconds_of_next(client, 5) < 2600.0


def test_run_seconds_begin_at_nothing_after_a_warm_start(root: Path, tmp_path: Path) -> None:
    long_run(root, 5000.0)
    long_run(tmp_path / "other", 7000.0)
    source = tmp_path / "other" / "default" / "step-000000002"
    index = source / "index.json"
    assert read_index(source).run_seconds == 7000.0, index
    with ckptd.Client(root, "second", daemon="off") as client:
        client.restore({}, source=source, strict=False)
        assert seconds_of_next(client, 3) < 100.0


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "x"), ReadFailed("x")], ids=["I/O", "descriptors"])
def test_a_head_that_cannot_be_read_keeps_no_snapshot_from_being_taken_and_none_is_counted_twice(
    root: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    long_run(root, 5000.0)

    def fails(*_: Any) -> Series:
        raise failure

    with ckptd.Client(root, daemon="off") as client:
        client._recorder._began -= 300  # it has trained for five minutes
        with monkeypatch.context() as patch:
            patch.setattr(recorder, "read_series", fails)
            assert 300.0 <= seconds_of_next(client, 3) < 400.0
        assert 300.0 <= seconds_of_next(client, 4) < 400.0  # the head is its own now


def test_the_first_step_after_a_warm_start_is_saved_though_the_run_has_checkpoints(
    root: Path, tmp_path: Path
) -> None:
    saved(root, 1)
    state = state_of(0.0)
    with ckptd.Client(root, daemon="off", cadence=ckptd.Cadence(every_steps=100)) as client:
        client.restore(state, source=elsewhere(tmp_path, 5000))
        steps = [step for step in range(1, 202) if client.maybe_snapshot(step, state)]
    assert steps == [1, 100, 200]
