"""The demo must fail when it proves nothing: each guard, one by one."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LATEST = Path("/root/single/step-000000060")


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("demo_proof")


def kill(proof: Any) -> Any:
    return proof.Kill(after_step=5, trainer_exit=-9, daemon_exit=-9, latest=LATEST, files=["ckpt.pt"])


def run(*, step: int = 4, batch: int = 1, path: Path = LATEST, change: float = 0.0) -> dict[str, Any]:
    """What a resumed trainer of 8 steps reports."""
    losses = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0 + change]
    resumed = {"path": str(path), "step": step, "batch_in_epoch": batch}
    return {"losses": losses, "resumed": resumed, "batches_per_epoch": 3}


def test_equal_losses_after_a_resume_in_mid_epoch_are_a_proof(proof: Any) -> None:
    outcome = proof.measure(run(), run(), kill(proof))
    assert (outcome.losses_compared, outcome.max_loss_diff_after_resume) == (4, 0.0)


def test_the_difference_is_the_largest_after_the_resume(proof: Any) -> None:
    outcome = proof.measure(run(), run(change=0.25), kill(proof))
    assert (outcome.max_loss_diff_after_resume, outcome.max_loss_diff_before_resume) == (0.25, 0.0)


@pytest.mark.parametrize(
    ("resumed", "reason"),
    [
        (run() | {"resumed": None}, "from nothing"),
        (run(step=0), "step 0"),
        (run(step=6), "step 6"),
        (run(batch=0), "middle of an epoch"),
        (run(batch=3), "middle of an epoch"),
        (run(path=LATEST.with_name("step-000000050")), "latest"),
    ],
)
def test_what_proves_nothing_fails(proof: Any, resumed: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        proof.measure(run(), resumed, kill(proof))


def test_a_run_with_nothing_left_to_compare_fails(proof: Any) -> None:
    with pytest.raises(SystemExit, match="no loss"):
        proof.measure(run(), run(step=8), replace(kill(proof), after_step=8))


def test_runs_of_unequal_length_fail(proof: Any) -> None:
    shorter = run()
    shorter["losses"] = shorter["losses"][:-1]
    with pytest.raises(ValueError, match="shorter"):
        proof.measure(run(), shorter, kill(proof))


class Told:
    """Stands for a process that said all of this before its signal came."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def lines(self, _timeout_s: float) -> Iterator[str]:
        yield from self._lines

    def sigkill(self) -> int:
        return -signal.SIGKILL


def test_a_trainer_that_went_past_a_checkpoint_before_its_signal_came_was_killed_after_its_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    demo = importlib.import_module("demo")
    (tmp_path / "ckpt.pt").touch()
    said = [*(f"step {step}/120  loss" for step in range(1, 74)), "a word", "step 7"]
    monkeypatch.setattr(demo, "start_daemon", lambda *_: Told())
    monkeypatch.setattr(demo, "start_trainer", lambda *_: Told(*said))
    monkeypatch.setattr(demo, "ckptd", lambda *_: SimpleNamespace(stdout=f"{tmp_path}\n"))
    killed = demo.train_and_kill(demo.PLAYS[0], tmp_path, [])
    assert (killed.after_step, killed.latest) == (73, tmp_path)
