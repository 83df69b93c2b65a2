"""What a restore did, as its caller is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckptd.disk.series import PassedOver


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a restore did.

    Attributes:
        step: Finished optimizer steps of the state that was restored.
        path: The checkpoint.
        passed_over: Newer ones that failed their checks, each with its reason.
        missing: Key paths that are in the live state and not in the checkpoint; they keep their values.
        unused: Key paths that are in the checkpoint and not in the live state; they were ignored.
        reshaped: Key paths of tensors that have another shape in the checkpoint; they keep their values.
        not_asked: Names of the components that the checkpoint has and `only` left out.
        dropped: Key paths of entries of live dicts that the checkpoint lacks: they were removed.
        tolerated: With `strict=False`: what differs and was taken all the same, each with its key path, in words: parameter
            groups (and whose settings each has now) and classes of optimizers, values of another kind or dtype, numbers
            that were rounded; and optimizer state that couldn't be taken.
        sequence: The checkpoint's commit counter; None when it isn't one of this run.
        run_seconds: Training seconds of the run up to it; 0.0 when it isn't one of this run (a warm start), whose
            seconds begin anew.
        in_part: `only` left out something of the live state.
        staged: It was restored from the slot in which an earlier client left it: `path` is the folder that a daemon
            makes of it, and may not be there yet.
    """

    step: int
    path: Path
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    sequence: int | None = None
    run_seconds: float = 0.0
    dropped: tuple[str, ...] = ()
    in_part: bool = False
    staged: bool = False

    @property
    def next_step(self) -> int:
        """The step to train next: step + 1; 1 after a warm start from another run that took over only a part."""
        return 1 if self.in_part and self.sequence is None else self.step + 1
