"""A trainer that is killed leaves no worker behind, though the pipe to it is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAINER = """
import multiprocessing, os, random, sys
import numpy, torch, ckptd
from torch.utils.data import DataLoader, Dataset

class Drawing(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        random.random(), numpy.random.rand(), torch.rand(1)
        return index

if __name__ == "__main__":
    running = ckptd.ResumableLoader(
        DataLoader(Drawing(), 8, num_workers=2, prefetch_factor=16, persistent_workers=True,
                   multiprocessing_context=sys.argv[1])
    )
    batches = iter(running)
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_of_a_trainer_that_is_killed_end(method: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(tmp_path / "trainer.py"), method],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        by = time.monotonic() + 30
        while any(map(runs, pids)) and time.monotonic() < by:
            time.sleep(0.05)
        left = [pid for pid in pids if runs(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


def runs(pid: int) -> bool:
    """Not one that has ended and waits for its new parent to hear of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
