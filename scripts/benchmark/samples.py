"""Raw numbers and what is made of them: medians, spread, ratios pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

_QUARTILES_FROM: Final = 5  # with fewer, quartiles are made up: the extremes are shown


@dataclass(frozen=True)
class Spread:
    """A median and what lies around it.

    Attributes:
        median, low, high: low and high are the quartiles, or with fewer than five numbers the extremes.
        count: How many numbers.
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Of at least one number."""
        middle = statistics.median(numbers)
        if len(numbers) < _QUARTILES_FROM:
            return cls(middle, min(numbers), max(numbers), len(numbers))
        low, _, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(middle, low, high, len(numbers))


def pairwise(measured: Sequence[float], against: Sequence[float]) -> list[float]:
    """measured ÷ against, each pair of one round: what slowed a round down slowed both."""
    return [one / other for one, other in zip(measured, against, strict=True)]


def percentile(numbers: Sequence[float], share: float) -> float:
    """Nearest rank: with fewer than 100 numbers the 99th percentile is the largest."""
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Samples:
    """Every number that was measured: section → contestant → measure → one number per round."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, section: str, contestant: str, measures: dict[str, float]) -> None:
        """One round of one contestant."""
        kept = self._numbers.setdefault(section, {}).setdefault(contestant, {})
        for measure, number in measures.items():
            kept.setdefault(measure, []).append(number)

    def drop(self, section: str, contestant: str) -> None:
        """Forget a contestant that didn't finish: its rounds pair with nobody's."""
        self._numbers.get(section, {}).pop(contestant, None)

    def get(self, section: str, contestant: str, measure: str) -> list[float]:
        """One number per round; empty when it wasn't measured."""
        return self._numbers.get(section, {}).get(contestant, {}).get(measure, [])

    def contestants(self, section: str) -> list[str]:
        """Who took part, in order of appearance."""
        return list(self._numbers.get(section, {}))

    def best(self, section: str, contestants: Iterable[str], measure: str) -> tuple[str, list[float]]:
        """The contestant with the lowest median, and its numbers: one for all rounds, or the best of each
        round would be nobody's, and luckier than anybody."""
        found = {name: self.get(section, name, measure) for name in contestants}
        found = {name: numbers for name, numbers in found.items() if numbers}
        if not found:
            return "", []
        name = min(found, key=lambda one: statistics.median(found[one]))
        return name, found[name]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return self._numbers
