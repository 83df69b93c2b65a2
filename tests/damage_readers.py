"""Each way to read a checkpoint or a run, and what it must say of a scene: judged by the bytes alone."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import ckptd
from ckptd.disk.series import PassedOver
from ckptd.errors import CheckpointGone, CkptdError, CorruptCheckpoint, InvalidArgument, ReadFailed
from ckptd_daemon.cli.main import main
from damage_scene import LINE, NEWEST, Scene, state_of

Faults = Iterator[str]
_CONTENT: Final = ("index.json", "tensors.json", "meta.pt")


def _load(scene: Scene, unreadable: bool) -> Faults:
    yield from _one(scene, lambda: ckptd.load(scene.newest), None, unreadable)


def _load_mapped(scene: Scene, unreadable: bool) -> Faults:
    """What is left in its file is only looked at for its size; nor is the hash that nobody compares."""
    files = scene.committed[f"{scene.run}/{NEWEST}"]
    seen = [name for name in files if name in _CONTENT or not _same_size(scene.newest / name, files[name])]
    if scene.only_hashes_changed and scene.damaged(NEWEST) == ["index.json"]:
        seen.remove("index.json")
    yield from _one(
        scene, lambda: ckptd.load(scene.newest, mmap=True), seen if scene.run == "sharded" else None, unreadable,
        checked=scene.run != "sharded",
    )  # fmt: skip


def _load_only(scene: Scene, unreadable: bool) -> Faults:
    """The files of other components aren't read."""
    files = [name for name in scene.committed[f"{scene.run}/{NEWEST}"] if not name.startswith("optimizer")]
    yield from _one(scene, lambda: ckptd.load(scene.newest, only=["model"]), files, unreadable)


def _verify(scene: Scene, unreadable: bool) -> Faults:
    def verified() -> None:
        ckptd.verify(scene.newest)

    yield from _one(scene, verified, None, unreadable)


def _one(
    scene: Scene, ask: Callable[[], dict[str, Any] | None], files: Iterable[str] | None, unreadable: bool, *,
    checked: bool = True,
) -> Faults:  # fmt: skip
    """A question about the newest checkpoint alone: `files` are those that are read; None means all."""
    damaged = scene.damaged(NEWEST, files)
    if _is_link(scene.newest):
        return  # whoever names a link has chosen where it leads; the run doesn't list it
    try:
        answer = ask()
    except CkptdError as error:
        if unreadable:
            yield from _faults_of_unreadable(error, scene)
        elif not damaged:
            yield f"refused though whole: {error}"
        else:
            yield from _faults_of_refusal(error, scene, damaged)
        return
    if unreadable:
        yield "read though it can't be"
    elif damaged and not (scene.is_other_runs and damaged != [""]):
        yield f"took it for whole; damaged: {damaged}"
    elif answer is not None and checked and not damaged:
        yield from faults_of_values(answer, scene.state(NEWEST))


def _faults_of_refusal(error: CkptdError, scene: Scene, damaged: list[str]) -> Faults:
    if damaged == [""]:
        wanted: tuple[type[CkptdError], ...] = (CheckpointGone, CorruptCheckpoint, InvalidArgument)
        if not isinstance(error, wanted):
            yield f"the wrong error: {type(error).__name__}: {error}"
        return
    if not isinstance(error, CorruptCheckpoint):
        yield f"the wrong error: {type(error).__name__}: {error}"
        return
    if "ckptd" not in error.todo and "before it" not in error.todo:
        yield f"doesn't say what to do: {error}"
    place = Path(error.where.partition(": ")[0])
    if damaged == ["index.json"]:
        return  # what it says is compared with the files, and then it is a file that differs
    if place.name not in damaged and place != scene.newest:
        yield f"blames {error.where}, damaged: {damaged}"
        return
    yield from _faults_of_numbers(error, scene, place)


def _faults_of_numbers(error: CorruptCheckpoint, scene: Scene, file: Path) -> Faults:
    """Seen against wanted: both hashes, or both sizes."""
    mode = file.lstat().st_mode if os.path.lexists(file) else 0
    wanted = scene.committed[f"{scene.run}/{NEWEST}"].get(file.name)
    if not stat.S_ISREG(mode) or wanted is None or file.name == "index.json" or "name" in error.what:
        return
    content = file.read_bytes()
    if len(content) != len(wanted):
        numbers = (str(len(content)), str(len(wanted)))
    else:
        numbers = (hashlib.sha256(content).hexdigest(), hashlib.sha256(wanted).hexdigest())
    for number, said in zip(numbers, (error.seen, error.wanted), strict=True):
        if number not in said:
            yield f"says {said!r} where it is {number}: {error}"


def _faults_of_unreadable(error: CkptdError, scene: Scene) -> Faults:
    if not isinstance(error, ReadFailed):
        yield f"called {type(error).__name__} what only can't be read now: {error}"
    elif str(scene.newest) not in str(error):
        yield f"doesn't say where: {error}"


def faults_of_values(loaded: dict[str, Any], wanted: dict[str, Any]) -> Faults:
    for name in loaded.keys() & wanted.keys():
        tensors = wanted[name] if isinstance(wanted[name], dict) else {}
        if not tensors and loaded[name] != wanted[name]:
            yield f"{name} is {loaded[name]!r}, saved was {wanted[name]!r}"
        for key, tensor in tensors.items():
            if not torch.equal(loaded[name][key], tensor):
                yield f"{name}.{key} isn't what was saved"


# --- questions about the run --------------------------------------------------------------------------


def _latest(scene: Scene, unreadable: bool) -> Faults:
    found = ckptd.latest_valid(scene.root, scene.run)
    yield from faults_of_answer(scene, unreadable, found and (found.name, found.passed_over))


def _latest_at_once(scene: Scene, unreadable: bool) -> Faults:
    """Without reading: what has a mark, and never what was changed since."""
    found = ckptd.latest_valid(scene.root, scene.run, wait=False)
    if found is not None and scene.damaged(found.name):
        yield f"offers {found.name}, which is damaged"


def _restore(scene: Scene, unreadable: bool, *, verify_first: bool = False) -> Faults:
    state = state_of(0, scene.run)
    with ckptd.Client(scene.root, run=scene.run, daemon="off") as client:
        resumed = client.restore(state, verify_first=verify_first)
    yield from faults_of_answer(scene, unreadable, resumed and (resumed.path.name, resumed.passed_over))
    if resumed is not None:
        yield from faults_of_values(state, scene.state(resumed.path.name))


def _restore_verified(scene: Scene, unreadable: bool) -> Faults:
    yield from _restore(scene, unreadable, verify_first=True)


def faults_of_answer(scene: Scene, unreadable: bool, found: Any) -> Faults:
    wanted = next(name for name in LINE if not scene.damaged(name) and not (unreadable and name == NEWEST))
    if found is None:
        yield "a silent fresh start"
        return
    name, passed = found
    if name != wanted:
        yield f"answers {name}, wanted {wanted}"
    listed = (scene.newest.is_dir() or not scene.damaged(NEWEST)) and not _is_link(scene.newest)
    if name != NEWEST and listed and not scene.is_other_runs:
        reasons = [one.reason for one in passed if one.name == NEWEST and one.reason]
        if not reasons:
            yield f"doesn't say why {NEWEST} isn't the answer: {passed}"
        elif not unreadable:
            yield from _faults_of_reason(scene, reasons[0])


def _faults_of_reason(scene: Scene, reason: str) -> Faults:
    damaged = scene.damaged(NEWEST)
    if not any(name in reason for name in damaged) and damaged != ["index.json"]:
        yield f"the reason names none of {damaged}: {reason}"


# --- the command line ---------------------------------------------------------------------------------


def _cli(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def _cli_verify(scene: Scene, unreadable: bool) -> Faults:
    where = ("--root", str(scene.root), "--run", scene.run)
    damaged = scene.damaged(NEWEST)
    code, out, err = _cli("verify", NEWEST, *where)
    wanted = 1 if unreadable else 0 if not damaged else 3 if damaged == [""] else 4
    if scene.is_other_runs and code == 0 and wanted == 4:
        return  # whole, and listed as of another run
    if code != wanted:
        yield f"ckptd verify leaves with {code}, wanted {wanted}: {err}"
    if code == 4 and damaged != ["index.json"] and not any(name in out and name in err for name in damaged):
        yield f"ckptd verify names none of {damaged}: {out}{err}"
    if code == 4 and "ckptd latest" not in err and "before it" not in err:
        yield f"ckptd verify doesn't say what to do: {err}"


def _cli_verify_all(scene: Scene, unreadable: bool) -> Faults:
    code, out, err = _cli("verify", "--all", "--root", str(scene.root), "--run", scene.run)
    there = [name for name in LINE if (scene.root / scene.run / name).is_dir()]
    bad = [name for name in there if scene.damaged(name) and not _is_link(scene.root / scene.run / name)]
    wanted = 4 if bad and not (scene.is_other_runs and bad == [NEWEST]) else 1 if unreadable else 0
    if code != wanted and not (scene.is_other_runs and code == 4):
        yield f"ckptd verify --all leaves with {code}, wanted {wanted}: {err}"
    for name in there:
        if name != NEWEST and name not in out:
            yield f"ckptd verify --all doesn't tell of {name}: {out}{err}"


def _cli_latest(scene: Scene, unreadable: bool) -> Faults:
    code, out, err = _cli("latest", "--root", str(scene.root), "--run", scene.run)
    passed = [PassedOver(NEWEST, line) for line in err.splitlines() if f"passed over {NEWEST}" in line]
    if code != 0:
        yield f"ckptd latest leaves with {code}: {err}"
    elif out.count("\n") != 1:
        yield f"ckptd latest prints more than a path: {out}"
    else:
        yield from faults_of_answer(scene, unreadable, (Path(out.strip()).name, passed))


def _cli_list(scene: Scene, _unreadable: bool) -> Faults:
    code, out, err = _cli("list", "--root", str(scene.root), "--run", scene.run)
    if code != 0:
        yield f"ckptd list leaves with {code}: {err}"
    for line in out.splitlines():
        _, name, _, _, state, *_ = line.split("\t")
        if state == "verified" and scene.damaged(name):
            yield f"ckptd list calls {name} verified"


def _same_size(path: Path, content: bytes) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == len(content)


def _is_link(path: Path) -> bool:
    return path.is_symlink()


Reader = Callable[[Scene, bool], Faults]

READERS: dict[str, Reader] = {
    "load": _load, "load(mmap=True)": _load_mapped, "load(only=)": _load_only, "verify": _verify,
    "latest_valid": _latest, "latest_valid(wait=False)": _latest_at_once,
    "restore": _restore, "restore(verify_first=True)": _restore_verified,
    "ckptd verify": _cli_verify, "ckptd verify --all": _cli_verify_all, "ckptd latest": _cli_latest,
    "ckptd list": _cli_list,
}  # fmt: skip


def judge(name: str, scene: Scene, *, unreadable: bool) -> list[str]:
    """What this reader says wrongly of the scene; any exception that isn't ours is one of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ckptd.errors.CheckpointWarning)
        try:
            return list(READERS[name](scene, unreadable))
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
