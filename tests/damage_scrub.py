"""A daemon with its verifier beside damage: what it finds by itself, what it moves, and what it says.

Every damaged copy is a run of one root, so that one daemon finds all of it: a third lay there when it started, a third
happens beside it, and a third lay there and doesn't show, as rot doesn't: that is for the scrub to find.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptd
from damage_kinds import KINDS
from damage_readers import faults_of_answer, faults_of_values
from damage_scene import ABANDONED, FILES, LINE, NEWEST, OTHER, Scene, make_root, mark_again, state_of
from fake_daemon import wait_until
from obstructed_daemon import obstructed_daemon
from rotten import read_long_ago

_BEFORE, _BESIDE, _UNSEEN = range(3)


def _share(which: int, cells: list[Any], seed: int) -> range:
    """A third of the cells, another one with each seed."""
    return range((which - seed) % 3, len(cells), 3)


def unseen(cells: list[Any], seed: int) -> int:
    """How many of these the scrub is asked for."""
    return len(_share(_UNSEEN, cells, seed))


def scrub(folder: Path, cells: list[Any], seed: int) -> dict[str, list[str]]:
    """What a daemon does wrongly about each of these cells; by the cell's words."""
    committed = make_root(folder / "master")
    root = folder / "root"
    shutil.copytree(folder / "master" / OTHER, root / OTHER)
    scenes = [_scene(folder / "master", root, cell, f"r{at:03d}", committed) for at, cell in enumerate(cells)]
    done = [False] * len(cells)

    def harm(which: int) -> None:
        for at in _share(which, cells, seed):
            file = FILES[cells[at].run][cells[at].place]
            path = scenes[at].newest / file if file else scenes[at].newest
            done[at] = KINDS[cells[at].kind](path, scenes[at], random.Random(seed)) is not False
            scenes[at].look()
            if which == _UNSEEN and scenes[at].newest.is_dir():
                read_long_ago(root / scenes[at].run, NEWEST)

    harm(_BEFORE)
    harm(_UNSEEN)
    with obstructed_daemon(root, "--keep-last", "1000") as daemon:
        harm(_BESIDE)
        tried = [(cell, scene) for cell, scene, yes in zip(cells, scenes, done, strict=True) if yes]
        log = root / ".ckptd" / "daemon.log"
        for _, scene in tried:
            if _is_to_be_found(scene):
                wait_until(lambda scene=scene: _told(log.read_text(), scene.run, NEWEST) != "")  # type: ignore[misc]
        said = log.read_text()
        found = {" / ".join(cell): faults for cell, scene in tried if (faults := list(_judge(scene, said)))}
        daemon.process.terminate()  # or it would leave its folder in shared memory
        daemon.process.wait(60)
    return found


def _scene(master: Path, root: Path, cell: Any, run: str, committed: dict[str, dict[str, bytes]]) -> Scene:
    shutil.copytree(master / cell.run, root / run)
    mark_again(root, run)
    mine = {
        f"{run}/{key.partition('/')[2]}": files
        for key, files in committed.items()
        if key.startswith(f"{cell.run}/")
    }
    return Scene(root, run, cell.place, mine, origin=cell.run)


def _is_to_be_found(scene: Scene) -> bool:
    return scene.damaged(NEWEST) not in ([], [""]) and not scene.is_other_runs


def _told(log: str, run: str, name: str) -> str:
    found = re.search(rf"checkpoint\.corrupt run={run} name={re.escape(name)} (.*)", log)
    return found[1] if found else ""


def _judge(scene: Scene, log: str) -> Iterator[str]:
    run_dir, damaged = scene.root / scene.run, scene.damaged(NEWEST)
    held = [path.name for path in (run_dir / "quarantine").glob(f"{NEWEST}-*")]
    told = _told(log, scene.run, NEWEST)
    if damaged == [] and (told or held):
        yield f"whole, and called corrupt: {told}"
    if damaged not in ([], [""]) and scene.newest.is_dir() == bool(held):
        yield f"neither in place nor in quarantine, or in both: {held}"
    if _is_to_be_found(scene):
        if "index.json" not in damaged and not held:
            yield f"its own, and not in quarantine: {told}"
        yield from _faults_of_words(
            scene, told, scene.newest if scene.newest.is_dir() else run_dir / "quarantine" / held[0]
        )
    for name in (*LINE[1:], ABANDONED):
        if name in LINE and scene.damaged(name):
            continue  # the other one of a swap
        if not (run_dir / name / "index.json").is_file():
            yield f"{name} is gone, and nobody damaged it"
    yield from _faults_of_answers(scene)


def _faults_of_words(scene: Scene, told: str, folder: Path) -> Iterator[str]:
    damaged = scene.damaged(NEWEST)
    if damaged != ["index.json"] and not any(name in told for name in damaged):
        yield f"names none of {damaged}: {told}"
    if "is the newest valid one before it" not in told:
        yield f"doesn't say which to take instead: {told}"
    for name in damaged[:1]:
        path, wanted = folder / name, scene.committed[f"{scene.run}/{NEWEST}"][name]
        if (
            name == "index.json"
            or not path.is_file()
            or path.is_symlink()
            or f"{name}: wrong sha256" not in told
        ):
            continue
        for content in (path.read_bytes(), wanted):
            if hashlib.sha256(content).hexdigest() not in told:
                yield f"doesn't say both hashes of {name}: {told}"


def _faults_of_answers(scene: Scene) -> Iterator[str]:
    """Beside the daemon, and of a client of it that overlaps."""
    found = ckptd.latest_valid(scene.root, scene.run)
    quarantined = not scene.newest.exists() and scene.damaged(NEWEST) != [""]
    if quarantined and found is not None and NEWEST not in [one.name for one in found.passed_over]:
        yield f"doesn't say that {NEWEST} lies in quarantine"
    elif not quarantined:
        yield from faults_of_answer(scene, False, found and (found.name, found.passed_over))
    state = state_of(0, scene.origin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ckptd.Client(scene.root, run=scene.run, daemon="attach", overlap=True) as client:
            resumed = client.restore(state)
    if resumed is None or found is None or resumed.path != found.path:
        yield f"restores {resumed}, the latest is {found}"
    else:
        yield from faults_of_values(state, scene.state(resumed.path.name))
