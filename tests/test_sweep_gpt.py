"""Field cases 21 and 22: the demo's GPT cut at every step of three epochs is the uninterrupted one."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd_places import end_daemon, places
from sweep_gpt import BATCHES, GptJob
from sweep_process import imported, in_process, trainer
from sweep_run import Sweep

__all__ = ["places"]

STEPS = 3 * BATCHES
LAYOUTS = [ckptd.Sharding(), ckptd.Sharding(shards=2)]
LAYOUT_IDS = ["single", "sharded"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Seeds:
    """Another seed for every job but the first: what is right must come from the checkpoint."""

    def __init__(self, steps: int, workers: int) -> None:
        self._steps, self._workers, self._next = steps, workers, 0

    def __call__(self) -> GptJob:
        self._next += 1
        return GptJob(self._steps, self._workers, self._next)


def sweep(folder: Path, workers: int, sharding: ckptd.Sharding, steps: int = STEPS) -> Sweep:
    found = Sweep(Seeds(steps, workers), folder, steps, sharding)
    found.whole()
    assert len(found.state_of("0")) > 20
    return found


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_cut_at_any_step_of_three_epochs_it_goes_on_bit_for_bit(
    tmp_path: Path, workers: int, sharding: ckptd.Sharding
) -> None:
    whole = sweep(tmp_path, workers, sharding)
    assert whole.cuts == [str(step) for step in range(STEPS)]
    for cut in whole.cuts:
        whole.check(cut)


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_cut_at_any_two_steps_of_a_short_run_it_goes_on_bit_for_bit(
    tmp_path: Path, sharding: ckptd.Sharding
) -> None:
    whole = sweep(tmp_path, 0, sharding, steps=BATCHES + 2)
    for cuts in combinations(whole.cuts, 2):
        whole.check(*cuts)


@pytest.mark.parametrize("workers", [0, 2])
def test_cut_at_two_and_more_steps_of_three_epochs_it_goes_on_bit_for_bit(
    tmp_path: Path, workers: int
) -> None:
    whole = sweep(tmp_path, workers, ckptd.Sharding(shards=2))
    chosen = random.Random(9)
    for cuts in chosen.sample(list(combinations(whole.cuts, 2)), 6):
        whole.check(*cuts)
    whole.check(*whole.cuts)  # killed after every single step


def test_killed_beside_a_real_daemon_it_goes_on_bit_for_bit(places: Path, tmp_path: Path) -> None:
    imported()
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    make, end = Seeds(STEPS, 2), str(STEPS)
    assert in_process(lambda: trainer(make, end, whole, None)) == 0
    for at in ("1", "3", "4", "6", "9"):
        code = in_process(lambda at=at: trainer(make, end, cut, places, at))  # type: ignore[misc]
        assert code == -signal.SIGKILL
        if at == "4":
            end_daemon(places)
    assert in_process(lambda: trainer(make, end, cut, places)) == 0
    assert cut.read_text().splitlines() == whole.read_text().splitlines()
