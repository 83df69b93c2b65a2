"""Sections of saves: the floors, and everybody's stall and time until it is done."""

from __future__ import annotations

from pathlib import Path

import floors
import ours
from dcp import dcp_contestants
from others import others
from rounds import Contestant, Course
from settings import Settings
from state import trained

SAVE = "save"


def measure(course: Course, settings: Settings, work: Path, root: Path) -> None:
    """One section for all: each ratio of the table has its pair in the same round."""
    saved = trained(settings.mib)
    course.samples.add("state", "saved", {"bytes": saved.nbytes, "tensors": saved.count})
    data = floors.random_bytes(saved.nbytes)
    folder = work / "save"
    folder.mkdir()
    found, missing = others(folder, saved)
    course.skipped |= missing
    copy, copy_again = floors.flat_copies(saved.nbytes)
    contestants: list[Contestant] = [
        copy, *ours.ways(root, saved), floors.sha256(data), *floors.raw_writes(folder, data), *found, copy_again,
        *dcp_contestants(folder, saved, process=settings.warmups > 0),
        *floors.raw_reads(folder, data), floors.raw_write_again(folder, data),
    ]  # fmt: skip
    course.run(SAVE, contestants, settings.rounds, settings.warmups)
