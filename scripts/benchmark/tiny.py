"""A state of a few KiB: snapshot() alone, durable, and the least that durable can cost."""

from __future__ import annotations

import os
from pathlib import Path

import floors
import ours
from rounds import Contestant, Course
from settings import Settings
from state import many

TINY = "tiny state"


def measure(course: Course, settings: Settings, work: Path, root: Path) -> None:
    """ckptd, and one temp + fsync + replace + folder fsync of the same bytes, twice."""
    saved, folder = many(8), work / "tiny"
    folder.mkdir()
    about = "everything that a large one gets: folder, table, index, hashes"
    contestants: list[Contestant] = [ours.Ours("ckptd", about, root, saved, "tiny")]
    for name in ("atomic replace", "control: atomic replace, again"):
        contestants.append(_replaced(folder, saved.nbytes, name))
    course.run(TINY, contestants, settings.tiny_rounds, settings.warmups)


def _replaced(folder: Path, nbytes: int, name: str) -> floors.Floor:
    data = os.urandom(nbytes)
    temp, target = folder / "one.tmp", folder / "one"

    def work() -> None:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        temp.replace(target)
        floors.sync_folder(folder)

    return floors.Floor(name, "one file: temp, fsync, replace, fsync of the folder", work, lambda: None)
