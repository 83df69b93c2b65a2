"""Corruption at rest: every kind of damage × every kind of file × every way to read it."""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from part import Deadline, Findings, Part

import damage_kinds
import damage_of_run
import damage_readers
import damage_scene
import damage_scrub


class Cell(NamedTuple):
    """One thing that is damaged in one way."""

    run: str
    place: str
    kind: str


def cells() -> list[Cell]:
    """All that make sense: what is said of files isn't done to folders."""
    found = []
    for run, files in damage_scene.FILES.items():
        for place in files:
            kinds = damage_kinds.FOLDER_KINDS if place == "folder" else damage_kinds.FILE_KINDS
            found += [Cell(run, place, kind) for kind in (kinds | damage_kinds.ANY_KINDS)]
    return found


def beside_cells() -> list[tuple[str, str]]:
    """Files of the run and of the root, each with each kind of damage."""
    return [(place, kind) for place in damage_of_run.PLACES for kind in damage_of_run.KINDS]


def pairwise() -> list[tuple[Cell, str]]:
    """Every cell with one reader, so that every kind of damage and every kind of file meets every reader once."""
    met: set[tuple[str, str]] = set()
    chosen: list[tuple[Cell, str]] = []

    def choose(cell: Cell, reader: str) -> None:
        met.update(_pairs(cell, reader))
        chosen.append((cell, reader))

    for cell in cells():
        choose(cell, max(damage_readers.READERS, key=lambda reader: len(_pairs(cell, reader) - met)))
    for reader in damage_readers.READERS:
        for cell in cells():
            if not _pairs(cell, reader) <= met:
                choose(cell, reader)
    return chosen


def _pairs(cell: Cell, reader: str) -> set[tuple[str, str]]:
    return {(cell.kind, reader), (f"{cell.run} {cell.place}", reader)}


class Matrix:
    """One master root, and a damaged copy of it for each cell."""

    def __init__(self, folder: Path) -> None:
        self._master, self._copy = folder / "master", folder / "copy"
        self._committed = damage_scene.make_root(self._master)

    @contextlib.contextmanager
    def scene(self, cell: Cell, seed: int) -> Iterator[damage_scene.Scene | None]:
        """The damaged copy; None where that kind of damage can't be done to it."""
        root = damage_scene.copied(self._master, self._copy, cell.run)
        damage_scene.mark_again(root, cell.run)
        file = damage_scene.FILES[cell.run][cell.place]
        scene = damage_scene.Scene(root, cell.run, cell.place, self._committed)
        done = damage_kinds.KINDS[cell.kind](
            scene.newest / file if file else scene.newest, scene, random.Random(seed)
        )
        try:
            scene.look()
            yield None if done is False else scene
        finally:
            damage_scene.give_rights_back(root)

    def faults_beside(self, place: str, kind: str, seed: int) -> list[str] | None:
        """What is wrong after damage to a file of the run or root; None where that can't be done."""
        root = damage_scene.copied(self._master, self._copy, "sharded")
        damage_scene.mark_again(root, "sharded")
        scene = damage_scene.Scene(root, "sharded", place, self._committed)
        scene.look()
        if not damage_of_run.damage_beside(scene, place, kind, seed):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [*damage_of_run.faults_beside(scene, place), *damage_of_run.faults_of_start(scene, place)]

    def faults(self, cell: Cell, reader: str, seed: int) -> list[str] | None:
        """What the reader says wrongly of it; None where there was nothing to read."""
        with self.scene(cell, seed) as scene:
            return None if scene is None else judged(cell, reader, scene)


def judged(cell: Cell, reader: str, scene: damage_scene.Scene) -> list[str]:
    """What the reader says wrongly of a scene."""
    no_rights = cell.kind == "no rights"
    file = damage_scene.FILES[cell.run][cell.place]
    unread = no_rights and not (reader == "load(only=)" and file.startswith("optimizer"))
    with damage_scene.bound_by_rights() if no_rights else contextlib.nullcontext():
        return damage_readers.judge(reader, scene, unreadable=unread)


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    """Every cell with every reader, again and again with other bits and pages until the time is over."""
    found, deadline, matrix = findings, Deadline(minutes), Matrix(folder)
    while True:
        for cell in cells():
            with matrix.scene(cell, seed) as scene:
                for reader in damage_readers.READERS if scene is not None else ():
                    if reader.startswith("restore"):
                        continue
                    _take(found, cell, reader, seed, judged(cell, reader, scene))
            for reader in damage_readers.READERS:
                if scene is not None and reader.startswith("restore"):  # its lock and birth change the root
                    _take(found, cell, reader, seed, matrix.faults(cell, reader, seed) or [])
        for place, kind in beside_cells():
            faults = matrix.faults_beside(place, kind, seed)
            found.tried[f"damage to {place}"] += faults is not None
            for fault in faults or ():
                found.fault(f"{place} / {kind}: {fault}", f"seed {seed}")
        beside = folder / f"scrub-{seed}"
        beside.mkdir()
        asked = [cell for cell in cells() if cell.kind != "no rights"]
        for words, faults in damage_scrub.scrub(beside, asked, seed).items():
            for fault in faults:
                found.fault(f"the verifier: {words}: {fault}", f"seed {seed}")
        found.tried["the verifier beside a daemon"] += len(asked)
        found.tried["of these the scrub, since nothing shows"] += damage_scrub.unseen(asked, seed)
        shutil.rmtree(beside)
        seed += 1
        if deadline.over():
            return


def _take(found: Findings, cell: Cell, reader: str, seed: int, faults: list[str]) -> None:
    found.tried[reader] += 1
    for fault in faults:
        found.fault(f"{reader}: {' / '.join(cell)}: {fault}", f"seed {seed}")


PART = Part("damage", "corruption at rest, found by every reader", run)
