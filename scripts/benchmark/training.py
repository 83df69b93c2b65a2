"""Training steps while a save runs, beside steps with an idle daemon and the same again."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Final

import ours
import torch
from rounds import Course, say
from settings import Settings
from state import Saved, trained
from torch import nn

import ckptd

TRAINING = "training step"

_WIDTH: Final = 512
_BATCH: Final = 64
_FEWEST_STEPS: Final = 10


class Job:
    """Forward, backward and Adam of a small network, with torch's own number of threads."""

    def __init__(self) -> None:
        self._model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(4)])
        self._optimizer = torch.optim.Adam(self._model.parameters())
        self._batch = torch.randn(_BATCH, _WIDTH)

    def step(self) -> float:
        """Seconds of one."""
        began = time.perf_counter()
        loss = nn.functional.mse_loss(self._model(self._batch), self._batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - began


def measure(course: Course, settings: Settings, _work: Path, root: Path) -> None:
    """Three blocks a round, in rotating order: idle, a save, idle again."""
    saved, job = trained(settings.mib), Job()
    with ckptd.Client(root=root, run="training", daemon="attach") as client:
        client.reserve(saved.live)
        steps = len(_beside_save(client, saved, job, 1))  # a warm-up, that says how long a save is
        for number in range(settings.training_rounds):
            say(f"{TRAINING}: round {number + 1} of {settings.training_rounds}")
            order = ["idle", "saving", "idle again"]
            for kind in [*order[number % 3 :], *order[: number % 3]]:
                if kind == "saving":
                    times = _beside_save(client, saved, job, number + 2)
                else:
                    times = [job.step() for _ in range(max(_FEWEST_STEPS, steps))]
                measures = {
                    "median": statistics.median(times),
                    "mean": statistics.fmean(times),
                    "steps": len(times),
                }
                course.samples.add(TRAINING, kind, measures)
    course.about[TRAINING] = {
        "saving": f"{torch.get_num_threads()} threads; every step from snapshot() until the checkpoint is verified"
    }


def _beside_save(client: ckptd.Client, saved: Saved, job: Job, step: int) -> list[float]:
    """The seconds of every step that ended before the checkpoint was verified; the stall isn't among them."""
    saved.change()
    ticket = client.snapshot(step, saved.live)
    times = [job.step()]
    while ticket.state not in ("verified", "failed", "corrupt"):
        times.append(job.step())
    ticket.wait("verified", timeout_s=ours.PATIENCE_S)
    return times[:-1] or times
