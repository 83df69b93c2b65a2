"""After which steps a run is killed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckptd.errors import InvalidArgument
from ckptd.proof.trace import Trace


def chosen_cuts(cuts: int | Sequence[int] | Literal["all"] | None, steps: int) -> tuple[int, ...] | None:
    """The steps in their order, each once; None when the middle is to be found.

    Raises:
        InvalidArgument: One isn't from 1 to steps - 1, or there is none.
    """
    if cuts is None:
        return None
    if cuts == "all":
        return tuple(range(1, steps))
    given = [cuts] if isinstance(cuts, int) else cuts
    right = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not right or not all(type(cut) is int and 0 < cut < steps for cut in given):
        raise InvalidArgument(
            "not steps to be killed after", where="cuts", seen=repr(cuts)[:200],
            wanted=f'1 to {steps - 1}, a list of such, or "all"',
        )  # fmt: skip
    return tuple(sorted(set(given)))


def middle_cut(base: Trace, steps: int) -> int:
    """The step nearest to the middle after which no ResumableLoader of the state is between two epochs."""
    nearest = sorted(range(1, steps), key=lambda step: (abs(2 * step - steps), step))
    inside = [step for step in nearest if step in base.moments and not base.moments[step].edge]
    return (inside or nearest)[0]
