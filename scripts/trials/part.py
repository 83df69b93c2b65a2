"""A part of scripts/torture: what it is called, how it is run, and what it found.

A part is a module of this folder with a PART in it, named in parts.py. It runs in a process of its own, with tests/
and this folder on sys.path, CKPTD_SHM_DIR and CKPTD_RUNTIME_DIR set to private folders that are empty, and a folder
for everything else. What it leaves in shared memory, or a process of its own that it leaves, is a fault.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """Something that must never happen.

    Attributes:
        what: What was seen, against what was wanted.
        repeat: How to see it again: a command, or the names of scenario, point and seed.
    """

    what: str
    repeat: str = ""


@dataclass
class Findings:
    """What one part did.

    Attributes:
        tried: What was tried → how often. Nothing in it fails the part: it would have proved nothing.
        faults: What was found.
        not_tried: What could not be tried on this machine → why. Never counted as passed.
        doubts: Why the part proves less than it says, if so: a kill that never hit a write. Each fails it.
        numbers: Anything else worth printing, by name; JSON values.
    """

    tried: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    not_tried: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def fault(self, what: str, repeat: str = "") -> None:
        self.faults.append(Fault(what, repeat))
        say(f"FAULT: {what}")

    @property
    def passed(self) -> bool:
        return bool(self.tried) and not self.faults and not self.doubts

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed, "tried": dict(self.tried),
            "faults": [{"what": fault.what, "repeat": fault.repeat} for fault in self.faults],
            "not tried": self.not_tried, "proved nothing because": self.doubts, "numbers": self.numbers,
        }  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: As --only takes it; the module's name.
        about: One line for the report.
        run: Called with the minutes it should take (one that is finite may take less, a step that has begun
            is finished), a seed that decides every random choice, an empty folder, and where to enter at once
            what was tried and found: what is in there when it breaks off is reported.
    """

    name: str
    about: str
    run: Callable[[float, int, Path, Findings], None]


class Deadline:
    """When a part's time is over."""

    def __init__(self, minutes: float) -> None:
        self._ends = time.monotonic() + 60.0 * minutes

    def over(self) -> bool:
        return time.monotonic() >= self._ends

    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())


def say(line: str) -> None:
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)
