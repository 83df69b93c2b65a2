"""What snapshots take of memory, in trainer and daemon together: slots, touched before they are needed, and no more."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.limits import MIB
from ckptd_places import places
from live_daemon import detached
from open_files import children_of

__all__ = ["places"]

pytestmark = pytest.mark.slow

STATE_MIB = 48


class Processes:
    """This process, the daemon and the daemon's verifier."""

    def __init__(self, daemon: int) -> None:
        self.pids = [os.getpid(), daemon, *children_of(daemon)]

    def proportional_bytes(self) -> int:
        """Memory of all together, what they share counted once; without libraries, of which others may have a share."""
        told = "Pss_Anon:" in Path("/proc/self/smaps_rollup").read_text()  # not by a kernel before 5.9
        fields = ("Pss_Anon:", "Pss_Shmem:") if told else ("Pss:",)
        return sum(_field(pid, "smaps_rollup", field) for pid in self.pids for field in fields)

    def begin(self) -> dict[int, int]:
        """Let the peaks begin here; returns how much is resident now."""
        for pid in self.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        return {pid: _field(pid, "status", "VmRSS:") for pid in self.pids}

    def peaks(self) -> dict[int, int]:
        return {pid: _field(pid, "status", "VmHWM:") for pid in self.pids}


def _field(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture
def state() -> dict[str, Any]:
    return {"w": {n: torch.ones(MIB // 4) for n in range(STATE_MIB)}, "losses": [0.5] * 10_000}


@pytest.fixture(params=[1, 2], ids=["one slot", "two slots"])
def at_work(request: Any, places: Path) -> Iterator[tuple[ckptd.Client, Processes, int]]:
    with detached(places) as record, ckptd.Client(places, daemon="attach", slots=request.param) as client:
        yield client, Processes(record.pid), request.param


def test_slots_are_touched_before_the_first_snapshot_and_nothing_of_the_states_size_is_allocated_after_it(
    at_work: tuple[ckptd.Client, Processes, int], state: dict[str, Any]
) -> None:
    client, processes, slots = at_work
    idle = processes.proportional_bytes()
    client.reserve(state)
    for step in range(1, 1 + slots):  # each slot's first
        before = faults()
        client.snapshot(step, state)
        assert faults() - before < STATE_MIB * MIB // 4096 // 50
    client.drain(verified=True)
    state_bytes = STATE_MIB * MIB
    assert processes.proportional_bytes() - idle <= slots * state_bytes * 1.02 + 32 * MIB
    resident = processes.begin()
    for step in range(3, 7):
        state["losses"].append(0.25)
        client.snapshot(step, state)
    client.drain(verified=True)
    grown = {pid: peak - resident[pid] for pid, peak in processes.peaks().items()}
    assert max(grown.values()) < state_bytes // 2, grown
