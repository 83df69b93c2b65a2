"""Damage to what lies beside the checkpoints: the run's index and decisions, and the files of the root's service folder.

None of it may cost a checkpoint, change an answer, bring an abandoned line back, or be waited for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import ckptd
from ckptd.errors import CkptdError, InvalidArgument, ReadFailed
from damage_kinds import ANY_KINDS, FILE_KINDS
from damage_readers import faults_of_answer, faults_of_values
from damage_scene import ABANDONED, LINE, NEWEST, ROOT_FILES, RUN_FILES, Scene, state_of

#: A hash in a checkpoint's index, which these files haven't; and what was tried elsewhere.
_NOT_HERE: Final = ("a hash missing", "a hash of none", "the table's hash missing", "a hash changed", "a size changed",
                    "a shard forgotten", "no rights", "swapped")  # fmt: skip
KINDS: Final = [kind for kind in FILE_KINDS | ANY_KINDS if kind not in _NOT_HERE]
PLACES: Final = [*RUN_FILES, *ROOT_FILES]


def damage_beside(scene: Scene, place: str, kind: str, seed: int) -> bool:
    """Do it; False where it can't be done there."""
    if place in ROOT_FILES:
        path = scene.root / ".ckptd" / ROOT_FILES[place]
    else:
        path = scene.root / scene.run
        path = (
            path / RUN_FILES[place]
            if "*" not in RUN_FILES[place]
            else next((path / "decisions").glob(RUN_FILES[place]))
        )
    if (
        not path.exists()
        or (path.is_dir() and kind in FILE_KINDS)
        or (path.is_file() and path.stat().st_size == 0)
    ):
        return False
    return (FILE_KINDS | ANY_KINDS)[kind](path, scene, random.Random(seed)) is not False


def faults_beside(scene: Scene, place: str) -> Iterator[str]:
    """What is answered, restored and saved wrongly after that."""
    try:
        found = ckptd.latest_valid(scene.root, scene.run)
    except ReadFailed as error:
        if place != "decisions":  # without them nobody can tell which line goes on
            yield f"latest_valid: {error}"
    else:
        yield from faults_of_answer(scene, False, found and (found.name, found.passed_over))
    yield from _faults_of_client(scene, place)
    there = {path.name for path in (scene.root / scene.run).glob("step-*")}
    if not there >= {*LINE, ABANDONED}:
        yield f"gone: {sorted({*LINE, ABANDONED} - there)}"


def _faults_of_client(scene: Scene, place: str) -> Iterator[str]:
    """Restore and save without a daemon: right, or refused by an error that names the damaged file."""
    state: dict[str, Any] = state_of(0, scene.origin)
    try:
        with ckptd.Client(scene.root, run=scene.run, daemon="off") as client:
            resumed = client.restore(state)
            if resumed is None or resumed.path.name != NEWEST:
                yield f"restores {resumed}"
            else:
                yield from faults_of_values(state, scene.state(NEWEST))
            ticket = client.snapshot(4, state)
            ticket.wait("committed", timeout_s=60)
    except CkptdError as error:
        if not any(
            name in str(error) for name in (ROOT_FILES.get(place, "decisions"), str(scene.root / scene.run))
        ):
            yield f"a client is refused without the file's name: {type(error).__name__}: {error}"
        return
    latest = ckptd.latest_valid(scene.root, scene.run) if place != "decisions" else None
    if latest is not None and latest.step != 4:
        yield f"after a save the latest is {latest.name}"


def faults_of_start(scene: Scene, place: str) -> Iterator[str]:
    """Settings that can't be read are said, by name; every other file costs no start."""
    from ckptd_daemon.series.settings_file import read_settings

    try:
        read_settings(scene.root)
    except InvalidArgument as error:
        if place != "ckptd.toml" or "ckptd.toml" not in str(error):
            yield f"settings: {error}"
