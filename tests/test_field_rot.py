"""Field case 39 end to end: a disk's bit that changed under a file's same size and times, and a daemon that looks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd_daemon.cli.main import main
from ckptd_places import places
from damage_scene import mark_again
from fake_daemon import wait_until
from obstructed_daemon import obstructed_daemon
from rotten import rot

__all__ = ["places"]


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((64,), float(step)), "b": torch.arange(16)}, "counter": step}


@pytest.mark.slow
def test_rot_that_no_look_shows_is_found_by_the_scrub_and_said_with_file_hashes_and_the_next_valid_step(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Field case 39."""
    with ckptd.Client(places, daemon="off", sharding=ckptd.Sharding(shards=2)) as client:
        for step in (1, 2, 3):
            client.snapshot(step, state_of(step))
    mark_again(places, "default")
    rotten = places / "default" / "step-000000003" / "model.shard-000.pt"
    wanted = hashlib.sha256(rotten.read_bytes()).hexdigest()
    rot(rotten)
    found = hashlib.sha256(rotten.read_bytes()).hexdigest()
    with obstructed_daemon(places) as daemon:
        wait_until(lambda: any((places / "default" / "quarantine").glob("step-000000003-*")))
        with ckptd.Client(places, daemon="attach") as client:
            wait_until(lambda: _scrub(client).get("found") == 1 and _scrub(client)["reading"] == "")
            scrub, state = _scrub(client), state_of(99)
            with pytest.warns(ckptd.errors.CheckpointWarning, match="step-000000003 is passed over"):
                resumed = client.restore(state)
            daemon.obstruct("write", "*/.tmp-*", "stall")
            saved = client.snapshot(4, state)
            try:
                daemon.wait_until_stalled()
                wait_until(lambda: _scrub(client)["gives_way"])
            finally:
                daemon.clear()
            saved.wait("committed", timeout_s=60)
            wait_until(lambda: not _scrub(client)["gives_way"])
        assert main(["status", "--root", str(places)]) == 0
        shown = capsys.readouterr().out
    said = f"model.shard-000.pt: wrong sha256: {found}, wanted {wanted}"
    log = (places / ".ckptd" / "daemon.log").read_text()
    assert (
        f"checkpoint.corrupt run=default name=step-000000003 {said}; step 2 (step-000000002) is the newest"
        in log
    )
    assert scrub["last_found"] == f"default/step-000000003: {said}"
    assert (scrub["every_s"], scrub["unread"]) == (7 * 86_400, 0)
    (line,) = [line for line in shown.splitlines() if line.startswith("scrub")]
    assert "every 7d00h" in line and f"1 found corrupt, last default/step-000000003: {said}" in line
    assert "1 in quarantine" in shown
    assert resumed is not None and (resumed.step, state["counter"]) == (2, 2)
    assert [passed.name for passed in resumed.passed_over] == ["step-000000003"]


def _scrub(client: ckptd.Client) -> dict[str, Any]:
    scrub: dict[str, Any] = client.status()["verifier"]["scrub"]
    return scrub
