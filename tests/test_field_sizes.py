"""Field case 33 end to end: many tensors, few descriptors, many saves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.limits import MIB
from ckptd_places import places
from live_daemon import detached, end
from open_files import children_of

__all__ = ["places"]

pytestmark = pytest.mark.slow

FEW_DESCRIPTORS = """
import resource, sys, torch, ckptd
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
def state(value):
    return {"model": {f"layer.{n}.weight": torch.full((3,), value + n) for n in range(3000)}}
with ckptd.Client(sys.argv[1], sharding=ckptd.Sharding(by="round-robin", shards=300)) as client:
    client.snapshot(1, state(0.0)).wait("verified", timeout_s=100)
    found = state(-1.0)
    assert client.restore(found).step == 1
assert all(torch.equal(a, b) for a, b in zip(found["model"].values(), state(0.0)["model"].values()))
"""


def test_three_thousand_tensors_in_three_hundred_files_need_no_more_than_256_descriptors(
    places: Path,
) -> None:
    """Field case 33."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", FEW_DESCRIPTORS, str(places)],
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    finally:
        end(places)


def test_a_state_of_twenty_thousand_tensors_comes_back_whole(places: Path) -> None:
    """Field case 33."""
    tensors = {f"layer.{n}.weight": torch.tensor([float(n), -1.0]) for n in range(20_000)}
    with detached(places), ckptd.Client(places, daemon="attach") as client:
        client.snapshot(1, {"model": tensors}).wait("committed", timeout_s=100)
        found = {"model": {name: torch.zeros(2) for name in tensors}}
        assert client.restore(found) is not None
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in tensors.items())


def test_the_memory_of_trainer_daemon_and_verifier_is_flat_over_two_hundred_saves(places: Path) -> None:
    """Field case 33."""
    state = {"w": torch.ones(MIB // 4), "parts": [torch.ones(10) for _ in range(100)], "losses": [0.5] * 1000}
    with detached(places) as record, ckptd.Client(places, daemon="attach") as client:
        for step in range(60):
            client.snapshot(step, state)
        client.drain(verified=True)
        pids = [os.getpid(), record.pid, *children_of(record.pid)]
        before = {pid: own_bytes(pid) for pid in pids}
        for step in range(60, 260):
            client.snapshot(step, state)
        client.drain(verified=True)
        grown = {pid: own_bytes(pid) - before[pid] for pid in pids}
    assert max(grown.values()) < 4 * MIB, grown


def own_bytes(pid: int) -> int:
    """Memory that a process has for itself alone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024
