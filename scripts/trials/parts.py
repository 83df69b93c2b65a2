"""Which parts scripts/torture has, in the order in which they run. Each is a module of this folder with a PART in it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from part import Part

#: Name → its share of the spare time against the others'.
WEIGHTS: Final[dict[str, float]] = {
    "crash": 1.0,
    "kill_points": 1.0,
    "kills": 2.0,
    "damage": 0.5,
    "histories": 2.0,
    "hostile": 0.5,
    "faults": 1.0,
    "soak": 2.0,
}

#: Name → what it takes to try each kind of thing once: about what was seen on two busy cores. With less a part says what
#: it didn't try or proves less than it should, or takes longer than it was given.
LEAST_MINUTES: Final[dict[str, float]] = {
    "crash": 5.0,
    "kill_points": 1.0,
    "kills": 2.0,
    "damage": 2.0,
    "histories": 1.0,
    "hostile": 1.0,
    "faults": 3.0,
    "soak": 4.0,
}


def first_share(names: Sequence[str], minutes: float) -> float:
    """How many of the minutes the first of these parts gets: what it needs at least, and its share of what is spare."""
    least = [LEAST_MINUTES[name] for name in names]
    spare = minutes - sum(least)
    if spare < 0:
        return minutes * least[0] / sum(least)
    return least[0] + spare * WEIGHTS[names[0]] / sum(WEIGHTS[name] for name in names)


def load(name: str) -> Part:
    """Import one part; the others may be broken."""
    part = importlib.import_module(name).PART
    if not isinstance(part, Part) or part.name != name:
        raise TypeError(f"scripts/trials/{name}.py has no PART of that name")
    return part
