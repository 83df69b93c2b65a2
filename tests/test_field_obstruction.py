"""Field cases 8, 9 and 36 end to end: a real daemon whose disk stalls or fails, and its trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.run_index import read_run_index
from ckptd.errors import CheckpointWarning, NoSpace, SaveFailed
from ckptd_places import places
from fake_daemon import wait_until
from obstructed_daemon import obstructed_daemon

__all__ = ["places"]

pytestmark = pytest.mark.slow


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step)), "counter": step}


def client_of(root: Path, **options: Any) -> ckptd.Client:
    return ckptd.Client(root, daemon="attach", **options)


def latest(root: Path) -> int | None:
    found = ckptd.latest_valid(root)
    assert found is None or torch.equal(ckptd.load(found.path)["weights"], state_of(found.step)["weights"])
    return None if found is None else found.step


def names(root: Path) -> list[str]:
    """All that lies in the run, but for its index and what is recent in it."""
    found = {path.name for path in (root / "default").iterdir()}
    return sorted(found - {"index.json", "recent.json", "newest.json"})


def settled(root: Path, *steps: int) -> None:
    """Nothing but these is there, once the run's index, which is written beside, has its name."""
    wait_until(lambda: names(root) == folders(*steps))


def folders(*steps: int) -> list[str]:
    return ["decisions", *(f"step-{step:09d}" for step in steps)]


def test_keep_last_one_keeps_the_good_one_while_the_next_stalls_and_another_waits(root: Path) -> None:
    """Field case 8: the next one stalls in mid-write, another is queued, and then it turns out corrupt."""
    with obstructed_daemon(root, "--keep-last", "1") as daemon, client_of(root) as client:
        client.snapshot(1, state_of(1)).wait("verified", timeout_s=60)
        daemon.obstruct("write", "*/.tmp-*/index.json", "stall")
        second = client.snapshot(2, state_of(2))
        daemon.wait_until_stalled()
        third = client.snapshot(3, state_of(3))
        assert latest(root) == 1
        assert [name for name in names(root) if not name.startswith(".tmp-")] == folders(1)
        wait_until(lambda: second.state == "writing")  # the word of it comes when it comes
        assert third.state == "staged"
        daemon.clear()
        third.wait("verified", timeout_s=60)
        wait_until(lambda: names(root) == folders(3))
        assert latest(root) == 3


def test_ctrl_c_for_the_daemons_group_in_the_middle_of_a_write_loses_nothing(root: Path) -> None:
    """Field case 36: the daemon finishes what it writes, writes what is queued, and leaves with 0."""
    with obstructed_daemon(root) as daemon:
        with client_of(root) as client:
            client.reserve(state_of(0))
            daemon.obstruct("write", "*/.tmp-*/ckpt.pt", "stall")
            tickets = [client.snapshot(step, state_of(step)) for step in (1, 2)]
            daemon.wait_until_stalled()
            os.killpg(daemon.process.pid, signal.SIGINT)
            wait_until(lambda: client.status()["daemon"]["state"] == "leaving")
            daemon.clear()
            client.wait(60)
            assert [ticket.committed for ticket in tickets] == [True, True]
        assert daemon.process.wait(60) == 0
    assert names(root) == folders(1, 2)
    assert latest(root) == 2


OBSTACLES = {
    "disk full at data": ("write", "*/.tmp-*/ckpt.pt", "ENOSPC", NoSpace),
    "disk full at the table": ("write", "*/.tmp-*/tensors.json", "ENOSPC", NoSpace),
    "disk full at the index": ("write", "*/.tmp-*/index.json", "ENOSPC", NoSpace),
    "quota at the index": ("write", "*/.tmp-*/index.json", "EDQUOT", NoSpace),
    "input/output error": ("write", "*/.tmp-*/ckpt.pt", "EIO", SaveFailed),
    "folder read-only": ("mkdir", "*/.tmp-*", "EROFS", SaveFailed),
    "no permission": ("mkdir", "*/.tmp-*", "EACCES", SaveFailed),
}


@pytest.mark.parametrize("how", ["warn", "raise"])
def test_whatever_fails_in_the_writer_the_trainer_is_told_and_saving_works_again(
    root: Path, how: Any
) -> None:
    """Field case 9: a typed error at the next call, latest unchanged, no residue, and the next save works."""
    with (
        obstructed_daemon(root, "--keep-last", "100") as daemon,
        client_of(root, on_error=how) as client,
    ):
        client.snapshot(1, state_of(1)).wait(timeout_s=60)
        saved = [1]
        for at, (call, path, error, kind) in enumerate(OBSTACLES.values()):
            step = 10 * (at + 1)
            daemon.obstruct(call, path, error)
            ticket = client.snapshot(step, state_of(step))
            wait_until(lambda ticket=ticket: client.status() and ticket.state == "failed")  # type: ignore[misc]
            assert isinstance(ticket.error, kind), ticket.error
            settled(root, *saved)
            assert latest(root) == saved[-1]
            daemon.clear()
            if how == "raise":
                with pytest.raises(kind, match=f"step {step} was not saved"):
                    client.snapshot(step + 1, state_of(step + 1))
                ticket = client.snapshot(step + 1, state_of(step + 1))
            else:
                with pytest.warns(CheckpointWarning, match=f"step {step} was not saved"):
                    ticket = client.snapshot(step + 1, state_of(step + 1))
            assert ticket.wait(timeout_s=60).committed
            saved.append(step + 1)
            assert latest(root) == step + 1


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS"])
def test_a_catalogue_that_cant_be_written_costs_no_checkpoint(root: Path, error: str) -> None:
    """Field case 9: the run's index is a cache; it is written as soon as the cause is gone."""
    with obstructed_daemon(root) as daemon, client_of(root) as client:
        daemon.obstruct("write", "*/default/.tmp-0-*", error)
        for step in (1, 2):
            client.snapshot(step, state_of(step)).wait("verified", timeout_s=60)
        client.drain(60, verified=True)
        assert read_run_index(root / "default") is None
        settled(root, 1, 2)
        assert latest(root) == 2
        daemon.clear()
        client.snapshot(3, state_of(3)).wait("verified", timeout_s=60)

        def indexed() -> bool:
            index = read_run_index(root / "default")
            return index is not None and len(index.marks) == 3

        wait_until(indexed)
