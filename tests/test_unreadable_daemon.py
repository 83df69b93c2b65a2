"""A real daemon that can't read the checkpoints' indexes for a while, and its trainer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptd.disk.decisions import read_decisions
from ckptd.disk.series import read_series
from fake_daemon import wait_until
from obstructed_daemon import obstructed_daemon
from test_field_obstruction import client_of, folders, latest, names, places, root, state_of

__all__ = ["places", "root"]

pytestmark = pytest.mark.slow

ODD = "step-000000999"


def log(root: Path) -> str:
    return (root / ".ckptd" / "daemon.log").read_text()


@pytest.mark.parametrize("error", ["EIO", "EMFILE"])
def test_a_short_hiccup_of_the_disk_forks_nothing_and_costs_no_checkpoint(root: Path, error: str) -> None:
    """While the daemon can't read the indexes it lists the run anew, commits, verifies and would remove."""
    with obstructed_daemon(root, "--keep-last", "2") as daemon, client_of(root) as client:
        for step in (1, 2):
            client.snapshot(step, state_of(step)).wait("verified", timeout_s=30)
        daemon.obstruct("read", "*/step-00000000[1-4]/index.json", error)
        os.mkdir(root / "default" / ODD)  # somebody's: a name that makes the daemon read the run again
        third = client.snapshot(3, state_of(3))
        third.wait("committed", timeout_s=30)
        wait_until(lambda: client.status() and (third.has_reached("verified") or "not_applied" in log(root)))
        client.snapshot(4, state_of(4)).wait("committed", timeout_s=30)
        wait_until(lambda: names(root) == [*folders(1, 2, 3, 4), ODD])  # the run's index is written beside
        daemon.clear()
        client.snapshot(5, state_of(5)).wait("verified", timeout_s=30)
        series = read_series(client._root, "default")
        assert read_decisions(root / "default").forks == ()
        assert all(entry.on_line for entry in series.entries)
        assert [index.parent for index in series.own][-1] == 4
        assert latest(root) == 5


def test_a_daemon_started_during_a_hiccup_goes_on_from_the_head_when_it_is_over(root: Path) -> None:
    with obstructed_daemon(root) as daemon, client_of(root) as client:
        for step in (1, 2):
            client.snapshot(step, state_of(step)).wait("verified", timeout_s=30)
        client.drain(30, verified=True)
    with (
        obstructed_daemon(root, first=f"read */{folders(2)[1]}/index.json EIO") as daemon,
        client_of(root, on_error="warn") as client,
    ):
        ticket = client.snapshot(3, state_of(3))
        with pytest.warns(match="can't be told"):
            client.wait(60)
        assert ticket.state == "failed"
        daemon.clear()
        client.snapshot(4, state_of(4)).wait("verified", timeout_s=30)
    assert read_decisions(root / "default").forks == ()
    assert latest(root) == 4
