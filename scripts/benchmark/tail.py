"""The stall while the daemon writes the snapshot before: its tail beside the quiet one."""

from __future__ import annotations

import time
from pathlib import Path

import ours
from rounds import Course, say
from settings import Settings
from state import Saved, trained

import ckptd

TAIL = "stall while writing"


def measure(course: Course, settings: Settings, _work: Path, root: Path) -> None:
    """Pairs: one snapshot of an idle daemon, and the next one while that is being written.

    Only those count that returned before the first was durable; the rest measured nothing.
    """
    saved = trained(settings.tail_mib)
    with ckptd.Client(root=root, run="tail", daemon="attach") as client:
        client.reserve(saved.live)
        for number in range(-2, settings.tail_count):
            say(f"{TAIL}: {number + 1} of {settings.tail_count}")
            quiet, busy, counts = _pair(client, saved, 2 * number + 10)
            if number >= 0:
                course.samples.add(TAIL, "ckptd", {"quiet": quiet} | ({"busy": busy} if counts else {}))
    course.about[TAIL] = {"ckptd": "a snapshot while the daemon writes the one before"}


def _pair(client: ckptd.Client, saved: Saved, step: int) -> tuple[float, float, bool]:
    """Seconds of both, and whether the second fell into the writing of the first."""
    began = time.perf_counter()
    first = client.snapshot(step, saved.live)
    quiet = time.perf_counter() - began
    while first.state == "staged":
        time.sleep(0.0001)
    began = time.perf_counter()
    second = client.snapshot(step + 1, saved.live)
    busy = time.perf_counter() - began
    counts = not first.finished
    second.wait("verified", timeout_s=ours.PATIENCE_S)
    return quiet, busy, counts
