"""SIGKILL at every call that changes something, of stories told from seeds; and several in a row, of starts too."""

from __future__ import annotations

from pathlib import Path

from part import Deadline, Findings, Part, say

from kill_tellings import Telling, Tried, at_random, every_call, tell
from torture_places import private_shm


def run(minutes: float, seed: int, folder: Path) -> Findings:
    """A story at each of its calls, then as many random ones, and the next story."""
    deadline, tried, findings, stories = Deadline(minutes), Tried(), Findings(), 0
    with private_shm() as work:
        while not stories or not deadline.over():
            calls = tell(Telling(seed + stories, ()), work, tried)
            stories += 1
            for number, telling in enumerate(every_call(seed + stories - 1, calls)):
                tell(telling, work, tried)
                tell(at_random(seed + stories * 1000 + number, calls), work, tried)
                if deadline.over():
                    break
            say(f"kill_points: {stories} stories, {dict(tried.points)}, {len(tried.faults)} faults")
    findings.tried.update(tried.points)
    findings.numbers["stories"] = stories
    for what, telling_ in tried.faults:
        findings.fault(what, telling_)
    return findings


PART = Part("kill_points", "SIGKILL at every call that changes something, and of the starts after it", run)
