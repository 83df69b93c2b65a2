"""The decisions of a run: one small file each, written once, before what depends on it, never changed.

They are never a cache: nothing else knows them. A file that can't be read (damaged, or of a kind a later
version made) is kept and counted, and while there is one nothing may be removed from the run.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.disk import durable
from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.disk.own_leftovers import unlink_quietly
from ckptd.errors import CorruptCheckpoint
from ckptd.format.fields import Fields
from ckptd.format.strict_json import canonical, parse
from ckptd.limits import MAX_DECISION_BYTES
from ckptd.names import DECISIONS_DIR, parse_step_folder, work_folder

SCHEMA: Final = "ckpt.v2-decision"

_FILE: Final = re.compile(r"([0-9]{12,19})-([a-z][a-z0-9-]{0,31})-([0-9a-f]{8})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fork:
    """A new line begins.

    It takes effect when its checkpoint is on disk: one named `name`, or any of `sequence` or above.

    Attributes:
        sequence: Of the first checkpoint of the new line.
        parent: Sequence of the checkpoint it goes on from; None when it begins from nothing.
        name: The folder that first checkpoint was to get.
    """

    sequence: int
    parent: int | None
    name: str


@dataclass(frozen=True, slots=True)
class Decisions:
    """All decisions of a run.

    Attributes:
        birth_run_id: The run's id from its birth; None when the run was never born here.
        forks: By sequence.
        highest_sequence: The highest in any file's name, readable or not; 0 for none.
        unreadable: (file name, reason) of each that can't be read.
        errors: The errno of each of those that only can't be read now; nothing says that they are damaged.
    """

    birth_run_id: str | None = None
    forks: tuple[Fork, ...] = ()
    highest_sequence: int = 0
    unreadable: tuple[tuple[str, str], ...] = ()
    errors: tuple[int, ...] = ()


def read_decisions(run_dir: Path) -> Decisions:
    """Read all decisions; no folder means none were made.

    Raises:
        OSError: The folder is there and can't be listed.
    """
    folder = run_dir / DECISIONS_DIR
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return Decisions()
    births: list[tuple[int, str]] = []
    forks: list[Fork] = []
    highest = 0
    unreadable: list[tuple[str, str]] = []
    errors: list[int] = []
    for name in names:
        match = _FILE.fullmatch(name)
        if match is None:
            continue  # what a crash left, or nothing of ours
        highest = max(highest, int(match[1]))
        try:
            decision = _read(folder, name, int(match[1]), match[2])
        except (CorruptCheckpoint, OSError) as error:
            unreadable.append((name, str(error)))
            if isinstance(error, OSError):
                errors.append(error.errno or errno.EIO)
            continue
        if isinstance(decision, Fork):
            forks.append(decision)
        else:
            births.append((int(match[1]), decision))
    if len({run_id for _, run_id in births}) > 1:
        unreadable.append((DECISIONS_DIR, "the run has two births"))
    forks.sort(key=lambda fork: fork.sequence)
    birth = min(births)[1] if births else None
    return Decisions(birth, tuple(forks), highest, tuple(unreadable), tuple(errors))


def settle(run_dir: Path) -> None:
    """Make durable what was decided: who recorded it may have been killed before the folder's sync.

    The caller holds the root's lock, and found a decision.

    Raises:
        OSError: It may not survive a power cut.
    """
    durable.fsync_dir(run_dir / DECISIONS_DIR)


def write_birth(run_dir: Path, run_id: str) -> None:
    """Record the run's id, once, before its first checkpoint. The caller holds the root's lock.

    Raises:
        OSError: Nothing was recorded, unless only the folder's sync failed.
    """
    _write(run_dir, 0, "birth", {"run_id": run_id})


def write_fork(run_dir: Path, sequence: int, parent: int | None, name: str) -> None:
    """Record that `sequence`, about to be committed as `name`, begins a new line from `parent`.

    The caller holds the root's lock. Recorded before the commit: were it recorded after, a crash in between
    and a damaged head would together bring an abandoned line back. The same fork is recorded once.

    Raises:
        OSError: Nothing was recorded, unless only the folder's sync failed.
    """
    if Fork(sequence, parent, name) in read_decisions(run_dir).forks:
        durable.fsync_dir(run_dir / DECISIONS_DIR)  # the try that recorded it may have failed at this
        return
    _write(run_dir, sequence, "fork", {"sequence": sequence, "parent": parent, "name": name})


def _write(run_dir: Path, sequence: int, kind: str, content: dict[str, Any]) -> None:
    folder = run_dir / DECISIONS_DIR
    durable.make_real_dir(run_dir)
    durable.make_real_dir(folder)
    obj = {"schema": SCHEMA, "kind": kind, **content}
    data = canonical(obj | {"sha256": _digest(obj)})
    temp = folder / work_folder("tmp", sequence)
    durable.write_new(temp, [data])
    try:
        durable.rename_new(temp, folder / f"{sequence:012d}-{kind}-{secrets.token_hex(4)}.json")
    except OSError:
        unlink_quietly(temp)
        raise


def _read(folder: Path, name: str, sequence: int, kind: str) -> Fork | str:
    where = str(folder / name)
    fd = open_folder(folder)
    try:
        data = read_small_file(fd, name, where, MAX_DECISION_BYTES)
    finally:
        os.close(fd)
    return _parsed(data, where, sequence, kind)


@functools.lru_cache(maxsize=64)  # they are read at every commit, and the same bytes say the same
def _parsed(data: bytes, where: str, sequence: int, kind: str) -> Fork | str:
    obj = parse(data, where=where, max_bytes=MAX_DECISION_BYTES)
    fields = Fields(obj, where)
    if fields.text("schema") != SCHEMA or fields.text("kind") != kind:
        raise CorruptCheckpoint("schema or kind is not what the name says", where=where)
    if canonical(obj) != data or fields.hexdigest("sha256") != _digest(obj):
        raise CorruptCheckpoint("the decision was changed", where=where)
    return _content(fields, kind, sequence, where)


def _content(fields: Fields, kind: str, sequence: int, where: str) -> Fork | str:
    if kind == "birth":
        run_id = fields.hexdigest("run_id", 32)
        fields.end()
        return run_id
    if kind != "fork":
        raise CorruptCheckpoint("a kind of decision this version doesn't know", where=where, seen=kind)
    fork = Fork(fields.count("sequence"), fields.count_or_none("parent"), fields.text("name", 64))
    fields.end()
    if fork.sequence != sequence or (fork.parent is not None and fork.parent >= sequence):
        raise CorruptCheckpoint("the fork's sequences can't be", where=where)
    if parse_step_folder(fork.name) is None:
        raise CorruptCheckpoint("not a checkpoint's name", where=where, seen=fork.name)
    return fork


def _digest(obj: dict[str, Any]) -> str:
    return hashlib.sha256(
        canonical({key: value for key, value in obj.items() if key != "sha256"})
    ).hexdigest()
