"""Whether a quantity that is sampled again and again stays as it is. Pure: numbers in, a verdict out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

ENOUGH: Final = 12  #: samples; fewer say nothing
_RISING: Final = 0.9


@dataclass(frozen=True)
class Trend:
    """What became of one quantity.

    Attributes:
        first: Its median over the first third of the samples.
        last: The same over the last third.
        rises: Of all pairs of a sample of the first third and one of the last, the share in which the later one is
            higher: a leak has nearly all, what only varies has half of them.
        allowed: By how much `last` may be above `first`.
    """

    first: float
    last: float
    rises: float
    allowed: float

    @property
    def grows(self) -> bool:
        return self.last - self.first > self.allowed and self.rises >= _RISING

    def __str__(self) -> str:
        return f"{self.first:g} → {self.last:g} (allowed {self.first + self.allowed:g}; {self.rises:.0%} of pairs rise)"


def trend(samples: Sequence[float], *, allowed: float) -> Trend | None:
    """Of samples in the order of time; None when they are too few."""
    third = len(samples) // 3
    if len(samples) < ENOUGH:
        return None
    first, last = samples[:third], samples[-third:]
    rising = sum(after > before for before in first for after in last)
    return Trend(median(first), median(last), rising / (third * third), allowed)
