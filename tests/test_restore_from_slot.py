"""A trainer that was killed and comes back restores from its last sealed slot, before the disk has it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.decisions import read_decisions
from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import read_series
from ckptd.errors import CheckpointWarning, RestoreFailed, StateMismatch, TimedOut
from ckptd.snapshot.sealed_slot import SealedSlot, sealed_slots
from ckptd.snapshot.slots import Slot, SlotState
from ckptd_places import places
from fake_daemon import wait_until
from impatient import impatient
from live_daemon import ckptd as ckptd_command
from obstructed_daemon import obstructed_daemon
from plain_state import bytes_of

__all__ = ["places"]

pytestmark = pytest.mark.slow

STALLED = ("mkdir", "*/.tmp-*", "stall")
STEPS = 8


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def client_of(root: Path, **how: Any) -> ckptd.Client:
    return ckptd.Client(root, daemon="attach", **how)


def state_of(value: float) -> dict[str, Any]:
    return {"weights": torch.full((1000,), value)}


def killed(act: Callable[[], object]) -> None:
    """Have a process of its own do it, which is killed then, what it made still in its hands."""
    pid = os.fork()
    if pid == 0:
        try:
            kept = act()
            assert kept is not None
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def saves(root: Path, *steps: int, restore: bool = False) -> ckptd.Client:
    client = client_of(root)
    if restore:
        client.restore(state_of(0.0))
    for step in steps:
        client.snapshot(step, state_of(float(step)))
    return client


def wait_until_proven(root: Path, count: int = 1) -> None:
    def proven() -> bool:
        slots = list(sealed_slots(Root.for_reading(root).slot_path))
        done = [slot.is_proven() for slot in slots]
        for slot in slots:
            slot.close()
        return len(done) == count and all(done)

    wait_until(proven)


def test_the_newest_state_comes_from_its_slot_while_the_disk_stalls_and_the_disk_has_the_same(
    root: Path,
) -> None:
    with obstructed_daemon(root) as daemon:
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 1, 2))
        with client_of(root) as client:
            state = state_of(0.0)
            resumed = client.restore(state)
            assert resumed is not None
            path = root / "default" / "step-000000002"
            assert (resumed.step, resumed.next_step, resumed.sequence, resumed.staged) == (2, 3, 2, True)
            assert resumed.path == path and not path.exists()
            assert torch.equal(state["weights"], state_of(2.0)["weights"])
            assert client.latest() is None and client.checkpoints() == []
            daemon.wait_until_stalled()
            wait_until_proven(root, 2)
            staged = client.status()["runs"][0]["staged"]
            assert [(one["step"], one["state"], one["proven"]) for one in staged] == [
                (1, "writing", True), (2, "staged", True),
            ]  # fmt: skip
            daemon.clear()
            assert client.drain(60) == 0
            again = client.restore(state)
            assert again is not None and (again.sequence, again.path, again.staged) == (2, path, False)


def test_with_the_daemon_killed_too_the_proof_made_by_it_serves_the_next_one(root: Path) -> None:
    with obstructed_daemon(root) as daemon:
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 1, 2))
        wait_until_proven(root, 2)
        daemon.wait_until_stalled()
        daemon.process.kill()
        daemon.process.wait()
    for command in ("list", "latest"):
        assert "2" not in ckptd_command(command, "--root", root).stdout
    shown = ckptd_command("status", "--root", root)
    assert shown.returncode == 5 and re.search(
        r"step 1 writing, taken .*s ago, 8.9 KiB; step 2 staged, taken ", shown.stdout
    )
    (run,) = json.loads(ckptd_command("status", "--json", "--root", root).stdout)["runs"]
    assert [(one["step"], one["state"], one["proven"]) for one in run["staged"]] == [
        (1, "writing", True), (2, "staged", True),
    ]  # fmt: skip
    with obstructed_daemon(root, first=" ".join(STALLED)) as daemon, client_of(root) as client:
        state = state_of(0.0)
        resumed = client.restore(state)
        assert resumed is not None and (resumed.step, resumed.sequence, resumed.staged) == (2, 2, True)
        assert torch.equal(state["weights"], state_of(2.0)["weights"])
        daemon.clear()
        assert client.drain(60) == 0
        assert [one.sequence for one in client.checkpoints()] == [1, 2]


def test_a_byte_that_changed_after_the_proof_is_neither_restored_nor_committed(root: Path) -> None:
    with obstructed_daemon(root) as daemon:
        with client_of(root) as client:
            client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 2, restore=True))
        wait_until_proven(root)
        flip_a_bit(root)
        with client_of(root) as client:
            state = state_of(0.0)
            said = pytest.warns(CheckpointWarning, match=r"step 2 can't be restored from its slot.*bytes")
            with said, pytest.raises(TimedOut), impatient(client):
                client.restore(state)
            assert torch.equal(state["weights"], state_of(0.0)["weights"])
            daemon.clear()
            client.drain(60)
            resumed = client.restore(state)
            assert resumed is not None and (resumed.step, resumed.staged) == (1, False)
            (run,) = client.status()["runs"]
            assert "aren't what was sealed" in run["last_failed"]["error"]
            assert [one.step for one in client.checkpoints()] == [1]


def flip_a_bit(root: Path) -> None:
    """In the data of the one slot with a snapshot."""
    for path in Root.for_reading(root).slot_path.glob("slot-*"):
        slot = Slot.open(path)
        if slot.header().state is not SlotState.FREE:
            slot.data[2000] ^= 4
        slot.close()


def test_a_slot_that_was_filled_again_in_mid_read_is_said_and_the_state_not_passed_off_as_whole(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with obstructed_daemon(root) as daemon:
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 1))
        with client_of(root) as client:
            wait_until_proven(root)
            state = state_of(0.0)
            with impatient(client), monkeypatch.context() as patched:
                patched.setattr(SealedSlot, "holds", lambda _: False)
                with pytest.raises(RestoreFailed, match=r"step 1 was torn.*filled again") as failed:
                    client.restore(state)
                assert failed.value.state_touched and isinstance(failed.value.__cause__, TimedOut)
            resumed = client.restore(state)
            assert resumed is not None and resumed.staged
            daemon.clear()
            client.wait(60)


def test_each_of_three_trainers_goes_on_from_the_slot_of_the_one_before(root: Path) -> None:
    with obstructed_daemon(root, "--keep-last", "9") as daemon:
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 1, 2))
        killed(lambda: saves(root, 3, restore=True))
        with client_of(root) as client:
            state = state_of(0.0)
            resumed = client.restore(state)
            assert resumed is not None and (resumed.step, resumed.sequence, resumed.staged) == (3, 3, True)
            client.snapshot(4, state)
            with pytest.raises(TimedOut), impatient(client):  # its own are waited for, as ever
                client.restore(state)
            daemon.clear()
            client.wait(60)
    assert line(root) == [(1, 1, None, True), (2, 2, 1, True), (3, 3, 2, True), (4, 4, 3, True)]


def line(root: Path) -> list[tuple[int, int, int | None, bool]]:
    """Step, sequence, parent, whether on the line: of every checkpoint."""
    entries = read_series(Root.for_reading(root), "default").entries
    return [(e.step, e.sequence or 0, e.index.parent, e.on_line) for e in entries if e.index is not None]


def test_what_goes_on_from_a_snapshot_that_never_became_a_checkpoint_stays_on_its_line(root: Path) -> None:
    """The disk takes every snapshot but the one in the slot."""
    with obstructed_daemon(root) as daemon:
        with client_of(root) as client:
            client.snapshot(1, state_of(1.0)).wait("verified", timeout_s=30)
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 2, restore=True))
        with client_of(root) as client:
            state = state_of(0.0)
            resumed = client.restore(state)
            assert resumed is not None and (resumed.step, resumed.staged) == (2, True)
            ticket = client.snapshot(3, state)
            daemon.obstruct("mkdir", "*/.tmp-2-*", "ENOSPC")
            ticket.wait(timeout_s=60)
    assert line(root) == [(1, 1, None, True), (3, 3, 1, True)]
    assert read_decisions(root / "default").forks == ()


def test_with_a_full_disk_the_newest_state_comes_from_its_slot_and_what_follows_is_saved_once_there_is_room(
    root: Path,
) -> None:
    with obstructed_daemon(root) as daemon:
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 1))
        daemon.obstruct("mkdir", "*/.tmp-*", "ENOSPC")
        with client_of(root) as client:
            state = state_of(0.0)
            resumed = client.restore(state)
            assert resumed is not None and (resumed.step, resumed.staged) == (1, True)
            assert client.drain(60) == 1  # as good as failed, for now
            daemon.clear()
            client.snapshot(2, state).wait(timeout_s=60)
    assert line(root) in ([(1, 1, None, True), (2, 2, 1, True)], [(2, 2, None, True)])


def test_a_step_of_the_disk_is_waited_for_and_one_in_the_slot_is_not(root: Path) -> None:
    with obstructed_daemon(root) as daemon:
        with client_of(root) as client:
            client.snapshot(1, state_of(1.0)).wait(timeout_s=60)
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 2, restore=True))
        with client_of(root) as client:
            state = state_of(0.0)
            wait_until_proven(root)
            for how in ({"step": 1}, {"source": root / "default" / "step-000000001"}):
                with pytest.raises(TimedOut), impatient(client):
                    client.restore(state, **how)
            with pytest.raises(StateMismatch):
                client.restore({"weights": torch.zeros(3)})
            for ways in ({"step": 2}, {"only": ["weights"]}, {"strict": False}, {"verify_first": True}):
                state["weights"].zero_()
                resumed = client.restore(state, **ways)
                assert resumed is not None and (resumed.step, resumed.staged) == (2, True), ways
                assert torch.equal(state["weights"], state_of(2.0)["weights"])
                assert resumed.in_part is False and bool(resumed.not_asked) == ("only" in ways)
            daemon.clear()
            client.wait(60)


class Job:
    """A small training whose losses depend on everything: moments, rate, generators, the ties and dtypes of its state."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 40), torch.nn.Dropout(0.5), torch.nn.Linear(40, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        half = torch.zeros(50_000, dtype=torch.bfloat16)
        self.state: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "train": {"seen": 0}, "half": half, "tied": half,
        }  # fmt: skip

    def step(self) -> float:
        loss = self.model(torch.randn(8, 40)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state["train"]["seen"] += 1
        self.state["half"].add_(1)
        return loss.item()


def train(root: str) -> None:
    """Five steps, saved, and no goodbye."""
    job, client = Job(), client_of(Path(root), sharding=ckptd.Sharding(shards=3))
    for _ in range(5):
        job.step()
    client.snapshot(5, job.state)
    os.kill(os.getpid(), signal.SIGKILL)


def test_losses_go_on_bit_for_bit_from_the_slot_and_the_disk_gives_the_same_state_later(root: Path) -> None:
    whole = Job()
    losses = [whole.step() for _ in range(STEPS)]
    with obstructed_daemon(root) as daemon:
        daemon.obstruct(*STALLED)
        command = [
            sys.executable,
            "-c",
            "import sys, test_restore_from_slot as t; t.train(sys.argv[1])",
            str(root),
        ]
        done = subprocess.run(command, cwd=Path(__file__).parent, timeout=250, check=False)
        assert done.returncode == -signal.SIGKILL
        with client_of(root) as client:
            job, later = Job(), Job()
            torch.rand(7)
            resumed = client.restore(job.state)
            assert resumed is not None and resumed.staged
            assert [job.step() for _ in range(resumed.next_step, STEPS + 1)] == losses[5:]
            daemon.clear()
            client.drain(60)
            again = client.restore(later.state)
            assert again is not None and not again.staged and again.sequence == resumed.sequence
            assert [later.step() for _ in range(again.next_step, STEPS + 1)] == losses[5:]
            for ours, theirs in zip(job.model.parameters(), later.model.parameters(), strict=True):
                assert bytes_of(ours.detach()) == bytes_of(theirs.detach())


JOB = """
import sys, ckptd, torch
client = ckptd.Client(sys.argv[1], daemon="attach", close_timeout_s=float(sys.argv[2]))
resumed = client.restore({"weights": torch.zeros(1000)})
print(resumed.step, resumed.staged, flush=True)
if sys.argv[3] == "close":
    client.close()
"""


@pytest.mark.parametrize("how", ["close", "ends"])
def test_a_script_with_nothing_left_to_train_waits_for_the_step_it_restored_from_its_slot(
    root: Path, how: str
) -> None:
    def begin(bound_s: float) -> subprocess.Popen[str]:
        job = [sys.executable, "-c", JOB, str(root), str(bound_s), how]
        return subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with obstructed_daemon(root) as daemon:
        daemon.obstruct(*STALLED)
        killed(lambda: saves(root, 1))
        out, said = begin(0.2).communicate(timeout=250)
        assert out == "1 True\n" and "step 1 was restored from shared memory and may not be on disk" in said
        second = begin(100)
        assert second.stdout is not None and second.stdout.readline() == "1 True\n"
        daemon.clear()
        assert second.communicate(timeout=250)[1] == "" and second.returncode == 0
        assert [one.step for one in read_series(Root.for_reading(root), "default").entries] == [1]
