"""What the demo measures, and what it refuses to take for a proof."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_processes import fail, say

#: A resumed loss may differ by less than this; on one machine it must be exactly equal.
MAX_DIFF = 1e-4

_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Kill:
    """How the first half of a play ended.

    Attributes:
        after_step: The last step the trainer reported.
        trainer_exit, daemon_exit: Their exit codes; -9 is SIGKILL.
        latest: What `ckptd latest` said before the trainer was started again.
        files: The files of that checkpoint.
    """

    after_step: int
    trainer_exit: int
    daemon_exit: int
    latest: Path
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one play measured; all of it goes into the report."""

    killed_after_step: int
    trainer_exit: int
    daemon_exit: int
    resumed_from: str
    resumed_step: int
    resumed_batch_in_epoch: int
    batches_per_epoch: int
    losses_compared: int
    max_loss_diff_after_resume: float
    max_loss_diff_before_resume: float
    checkpoint_files: list[str]


def measure(baseline: dict[str, Any], again: dict[str, Any], kill: Kill) -> Outcome:
    """Compare the resumed run's losses with the baseline's; fails the demo where that would prove nothing."""
    resumed = again["resumed"]
    if resumed is None:
        fail("the second trainer began from nothing")
    step, batch, per_epoch = resumed["step"], resumed["batch_in_epoch"], again["batches_per_epoch"]
    if not 0 < step <= kill.after_step:
        fail(f"resumed at step {step}, wanted one from 1 to {kill.after_step}")
    if not 0 < batch < per_epoch:
        fail(f"resumed at batch {batch} of {per_epoch}, wanted the middle of an epoch")
    if Path(resumed["path"]) != kill.latest:
        fail(f"resumed from {resumed['path']}, but `ckptd latest` said {kill.latest}")
    diffs = [abs(a - b) for a, b in zip(baseline["losses"], again["losses"], strict=True)]
    if not diffs[step:]:
        fail("no loss was compared")
    return Outcome(
        killed_after_step=kill.after_step,
        trainer_exit=kill.trainer_exit,
        daemon_exit=kill.daemon_exit,
        resumed_from=f"{kill.latest.parent.name}/{kill.latest.name}",
        resumed_step=step,
        resumed_batch_in_epoch=batch,
        batches_per_epoch=per_epoch,
        losses_compared=len(diffs[step:]),
        max_loss_diff_after_resume=max(diffs[step:]),
        max_loss_diff_before_resume=max(diffs[:step]),
        checkpoint_files=kill.files,
    )


def side_by_side(baseline: list[float], resumed: list[float], outcome: Outcome) -> None:
    """Print both losses at a few steps after the resume, with all digits, and the largest difference."""
    first, last = outcome.resumed_step + 1, len(baseline)
    every = max(1, (last - first) // (_ROWS - 1))
    say(f"       {'step':>5}  {'uninterrupted':>20}  {'killed and resumed':>20}  difference")
    for step in sorted({*range(first, last + 1, every), last}):
        a, b = baseline[step - 1], resumed[step - 1]
        say(f"       {step:>5}  {a!r:>20}  {b!r:>20}  {abs(a - b)!r}")
    diff = outcome.max_loss_diff_after_resume
    exact = "exactly 0.0" if diff == 0.0 else f"{diff!r}, NOT exactly 0.0"
    say(f"     largest difference over {outcome.losses_compared} losses after the resume: {exact}")
