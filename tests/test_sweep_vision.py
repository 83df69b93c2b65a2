"""Field cases 21, 22, 23 and 25: a vision job cut at every step of three epochs is the uninterrupted one."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd_places import end_daemon, places
from sweep_exchange import exchanged
from sweep_process import imported, in_process, trainer
from sweep_run import Sweep, step_of
from sweep_vision import BATCHES, VisionJob

__all__ = ["places"]

STEPS = 3 * BATCHES
LAYOUTS = [ckptd.Sharding(), ckptd.Sharding(shards=2)]
LAYOUT_IDS = ["single", "sharded"]
LOADING: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2, "prefetch_factor": 4},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sweep(folder: Path, loading: str, sharding: ckptd.Sharding, steps: int = STEPS, **more: Any) -> Sweep:
    found = Sweep(lambda: VisionJob(steps, **LOADING[loading]), folder, steps, sharding)
    found.whole(**more)
    return found


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("loading", LOADING)
def test_cut_at_any_step_of_three_epochs_it_goes_on_bit_for_bit(
    tmp_path: Path, loading: str, sharding: ckptd.Sharding
) -> None:
    whole = sweep(tmp_path, loading, sharding)
    assert len(whole.cuts) == STEPS + 2  # each step's end, the start, and two edges between epochs
    for cut in whole.cuts:
        whole.check(cut)


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_cut_at_any_two_places_of_a_short_run_it_goes_on_bit_for_bit(
    tmp_path: Path, sharding: ckptd.Sharding
) -> None:
    whole = sweep(tmp_path, "no workers", sharding, steps=BATCHES + 3)
    for cuts in combinations(whole.cuts, 2):
        whole.check(*cuts)


@pytest.mark.parametrize("loading", LOADING)
def test_cut_at_two_and_more_places_of_three_epochs_it_goes_on_bit_for_bit(
    tmp_path: Path, loading: str
) -> None:
    whole = sweep(tmp_path, loading, ckptd.Sharding(shards=2))
    chosen = random.Random(8)
    pairs = list(combinations(whole.cuts, 2))
    for cuts in chosen.sample(pairs, 8):
        whole.check(*cuts)
    whole.check(*whole.cuts)  # killed after every single step


@pytest.mark.parametrize("loading", LOADING)
def test_saving_at_every_step_changes_nothing(tmp_path: Path, loading: str) -> None:
    saving = sweep(tmp_path, loading, ckptd.Sharding())
    assert sweep(tmp_path, loading, ckptd.Sharding(), save=False).trace == saving.trace


def test_the_job_has_in_it_what_the_sweep_is_about(tmp_path: Path) -> None:
    """Overflows that the scaler skips, growth, moments, changing buffers and rates; else the sweep proves little."""
    trace = sweep(tmp_path, "no workers", ckptd.Sharding(), save=False).trace
    scales = {shown["scaler.'scale'"] for shown in trace.values()}
    assert len(scales) > 2
    assert sum(before == after for before, after in _weights(trace)) > 1  # skipped steps
    for path in ("model.'1.running_var'", "ema.'module.1.running_var'", "optimizer.1.0.state.'exp_avg'"):
        assert len({shown.get(path) for shown in trace.values()}) > 5, path
    assert {shown["optimizer.0.'lr'"] for shown in trace.values()} == {
        shown["optimizer.1.'lr'"] for shown in trace.values()
    }


@pytest.mark.filterwarnings("ignore::ckptd.CheckpointWarning")
@pytest.mark.parametrize("loading", ["no workers", "workers"])
def test_another_state_of_any_one_generator_changes_what_the_run_shows(tmp_path: Path, loading: str) -> None:
    """Each counts in what the job does; else the sweep would be as green without it in the checkpoint."""
    whole, cut = sweep(tmp_path, loading, ckptd.Sharding()), "7"
    wanted = [shown["shown"] for where, shown in whole.trace.items() if step_of(where) > 7]
    assert whole.shown_from(ckptd.load(tmp_path / cut)) == wanted
    # What only a resume that fetches again draws from, or the proof of one, isn't used here; nor is a GPU.
    unused = ("rng.cuda", "loader.pass.start.", "loader.pass.first.", "loader.pass.proofs.")
    order = "loader.pass.first.generators.generator.2"  # of the epoch's samples
    every = exchanged(lambda: ckptd.load(tmp_path / cut))
    used = {
        where: whole.shown_from(state) != wanted
        for where, state in every
        if where == order or not where.startswith(unused)
    }
    assert {"rng.python", "rng.numpy", "rng.torch", "noise.numpy", "noise.torch", order} <= set(used)
    workers = [path for path in used if path.startswith("loader.pass.workers.")]
    assert len(workers) == (8 if loading == "workers" else 0)  # three global ones and the dataset's, of each
    assert [path for path, changed in used.items() if not changed] == []


def _weights(trace: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    weights = [shown["model.'0.weight'"] for where, shown in trace.items() if "edge" not in where]
    return list(pairwise(weights))


def test_killed_beside_a_real_daemon_it_goes_on_bit_for_bit(places: Path, tmp_path: Path) -> None:
    imported()
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    end = str(STEPS)

    def make() -> VisionJob:
        return VisionJob(STEPS, **LOADING["workers"])

    assert in_process(lambda: trainer(make, end, whole, None)) == 0
    for at in ("1", "4", "5", "5 edge", "7", "13"):
        code = in_process(lambda at=at: trainer(make, end, cut, places, at))  # type: ignore[misc]
        assert code == -signal.SIGKILL
        if at == "5":
            end_daemon(places)
    assert in_process(lambda: trainer(make, end, cut, places)) == 0
    lines = cut.read_text().splitlines()
    assert lines.count(lines[5]) == 2  # killed at the edge, after step 5 was saved: the edge comes again
    assert [line for number, line in enumerate(lines) if number != 5] == whole.read_text().splitlines()
