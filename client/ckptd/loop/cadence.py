"""When to save: every so many steps, every so many seconds, whichever comes first.

Pure: the clock and the memory of the last snapshot are the caller's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckptd.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """How often `Client.maybe_snapshot` saves.

    Attributes:
        every_steps: Save at the absolute multiples of this many steps: with 500 at 500, 1000, 1500, also in a
            run that was resumed at 730. None: steps don't count.
        every_s: Save once this many seconds have passed since the last snapshot (of any cause), or since the
            start. None: time doesn't count.
        first: Save after the first step too, as long as the run has no checkpoint at all, and after a warm
            start from another run: a job that can't save should fail in its first minute and not in its
            tenth hour.

    Raises:
        InvalidArgument: Both are None, or one isn't positive.
    """

    every_steps: int | None = None
    every_s: float | None = None
    first: bool = True

    def __post_init__(self) -> None:
        if self.every_steps is None and self.every_s is None:
            raise InvalidArgument(
                "a cadence that is never due", where="Cadence", wanted="every_steps, every_s or both"
            )
        steps, seconds = self.every_steps, self.every_s
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise InvalidArgument(
                "not a number of steps", where="every_steps", seen=repr(steps), wanted="1 or more"
            )
        if seconds is not None and not _is_duration(seconds):
            raise InvalidArgument(
                "not a duration", where="every_s", seen=repr(seconds), wanted="over 0, finite"
            )

    def due(self, step: int, *, last_step: int | None, since_s: float) -> bool:
        """Whether to save after `step`.

        Args:
            step: Finished optimizer steps.
            last_step: The step of the newest snapshot: the last one this client took, or else the one of this
                run it restored from, or else the newest checkpoint of the run. None: the run has none, or none
                of the line that a warm start begins.
            since_s: Seconds since the last snapshot of this client; before its first one, since it started.
                From a monotonic clock.

        Returns:
            True when a multiple of `every_steps` was reached or passed since last_step (passed, so that a
            loop which asks only at some steps saves at the first one after the multiple), when every_s has
            passed, or when nothing is saved yet and `first` is set. Never twice for one step.
        """
        if last_step is None and self.first:
            return True
        if step == last_step:
            return False
        return self._steps_are_due(step, last_step or 0) or (
            self.every_s is not None and since_s >= self.every_s
        )

    def _steps_are_due(self, step: int, last_step: int) -> bool:
        if self.every_steps is None:
            return False
        if step < last_step:  # The loop counts from an earlier step again: only the multiples themselves.
            return step % self.every_steps == 0
        return step // self.every_steps > last_step // self.every_steps


def _is_duration(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value > 0
