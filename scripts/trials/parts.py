"""Which parts scripts/torture has, in the order in which they run. Each is a module of this folder with a PART in it."""

from __future__ import annotations

import importlib
from typing import Final

from part import Part

#: Name → its share of the time against the others'.
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


def load(name: str) -> Part:
    """Import one part; the others may be broken."""
    part = importlib.import_module(name).PART
    if not isinstance(part, Part) or part.name != name:
        raise TypeError(f"scripts/trials/{name}.py has no PART of that name")
    return part
