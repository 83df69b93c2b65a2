"""SIGKILL at every call that changes something, of stories told from seeds; and several in a row, of starts too."""

from __future__ import annotations

from pathlib import Path

from part import Deadline, Findings, Part, say

from kill_tellings import Telling, Tried, at_random, every_call, tell
from torture_places import private_shm


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    """A story at each of its calls, then as many random ones, and the next story."""
    tried = Tried(findings.tried)
    try:
        with private_shm() as work:
            _tell(Deadline(minutes), seed, work, tried)
    finally:
        for what, telling in tried.faults:
            findings.fault(what, telling)


def _tell(deadline: Deadline, seed: int, work: Path, tried: Tried) -> None:
    stories = 0
    while not stories or not deadline.over():
        calls = tell(Telling(seed + stories, ()), work, tried)
        tried.points["stories"] += 1
        for number, telling in enumerate(every_call(seed + stories, calls)):
            tell(telling, work, tried)
            tell(at_random(seed + (stories + 1) * 1000 + number, calls), work, tried)
            if deadline.over():
                break
        stories += 1
        say(f"kill_points: {stories} stories, {dict(tried.points)}, {len(tried.faults)} faults")


PART = Part("kill_points", "SIGKILL at every call that changes something, and of the starts after it", run)
