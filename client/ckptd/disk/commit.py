"""The commit: one snapshot's bytes become one checkpoint folder, in an order that no crash can break.

The rename commits, the index proves. What must be true at every instant, whatever is killed or cut off where:

1. A folder named step-… is complete: every file in it was synced and closed, index.json the last, before the
   folder, the folder before the rename.
2. Nothing that was committed before is touched: a new folder gets a name nobody has.
3. Nothing is acknowledged (commit_snapshot hasn't returned) before the sync of RUN made the name durable.
4. What forks a line is recorded, durably, before the first checkpoint of that line can exist.
5. A sync that failed is never tried again on the same file: the folder is dropped and written again from the
   snapshot, once. When it was the sync of RUN, after the rename, the folder goes to trash first; and when the
   second try fails too, nobody can say what a power cut will leave: the answer is *unknown*.
6. On any other error nothing is left behind, or only a .tmp-/.trash- folder whose removal failed too: the
   next commit to the run tries it again, and so does the next start.

What should be true, and can be repaired: the run's index lists the checkpoint. It is a cache, written later.

Crash points, in order (see durable.crash_point):

    before-temp          nothing but, perhaps, the fork is on disk
    after-temp           an empty .tmp-… folder
    after-file           at least one data file written, and synced if it isn't small
    before-index         all data files and tensors.json, the small ones not synced
    after-index          index.json too, all synced
    after-folder-sync    the whole folder is durable, under its temporary name
    after-rename         it has its name, which a power cut may still take
    after-run-sync       committed, and nobody knows it yet

The caller holds the root's lock.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.disk import durable, own_leftovers
from ckptd.disk.checkpoint_folder import Check, Disk, write_folder
from ckptd.disk.decisions import write_fork
from ckptd.disk.durable import FsyncFailed
from ckptd.disk.lineage import Position
from ckptd.disk.save_error import save_error
from ckptd.disk.writing import Writing
from ckptd.errors import CkptdError, InvalidArgument, OutcomeUnknown
from ckptd.format.plan import CheckpointPlan, plan_checkpoint
from ckptd.format.records import CheckpointIndex
from ckptd.names import parse_step_folder, step_folder, work_folder
from ckptd.snapshot.descriptor import Descriptor

__all__ = ["Committed", "Position", "commit_plan", "commit_snapshot", "write_checkpoint_folder"]

_log = logging.getLogger(__name__)

#: What a full or broken disk, a lack of descriptors, threads or memory looks like.
_FAILURES: Final = (OSError, CkptdError, MemoryError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that is durable.

    Attributes:
        name: Its folder's name.
        path: Its folder.
        index: Its index.
        bytes: Of all its files but the index.
        seconds: From the call to the return.
    """

    name: str
    path: Path
    index: CheckpointIndex
    bytes: int
    seconds: float


def commit_snapshot(
    run_dir: Path, descriptor: Descriptor, data: memoryview, position: Position, *,
    threads: int | None = None, writing: Writing | None = None, check: Check = lambda: None,
) -> Committed:  # fmt: skip
    """Commit one snapshot to its run, durably. When this returns, no crash can lose it.

    Args:
        run_dir: ROOT/RUN; made when missing.
        descriptor: What the snapshot holds.
        data: Its bytes; read only, and only until this returns.
        position: Where in the run it goes.
        threads: Files written at once; None for what suits the CPUs this process may use.
        writing: How files are written; one for all commits to a root. None: at normal priority, as fast as it goes.
        check: Called once all of data is written and before that counts: what it raises is raised, and nothing of the
            snapshot is left.

    Raises:
        NoSpace: The disk or the quota is full. Nothing of this snapshot is on disk.
        SaveFailed: Another I/O error. Nothing of this snapshot is on disk.
        OutcomeUnknown: It may or may not appear after a power cut; as things stand it is not there.
        UnstorableState: The descriptor holds what no file can. Nothing was written.
    """
    plan = plan_checkpoint(descriptor)
    return commit_plan(
        run_dir, descriptor, data, position, plan, threads=threads, writing=writing, check=check
    )


def commit_plan(
    run_dir: Path, descriptor: Descriptor, data: memoryview, position: Position, plan: CheckpointPlan, *,
    threads: int | None = None, writing: Writing | None = None, disk: Disk = durable,
    check: Check = lambda: None,
) -> Committed:  # fmt: skip
    """commit_snapshot for files already planned.

    Args:
        disk: What writes, syncs and renames; tests hand in one that fails.
    """
    began = time.monotonic()
    try:
        durable.make_real_dir(run_dir)
        own_leftovers.remove(run_dir)
        name = _free_name(run_dir, descriptor.step, position.repeat)
        if position.forks:
            write_fork(run_dir, position.sequence, position.parent, name)
    except OSError as error:
        raise save_error(error, _what(descriptor), run_dir) from error
    how = (threads, writing or Writing(), disk, check)
    index = _Commit(run_dir, name, descriptor, data, position, plan, *how).run()
    return Committed(name, run_dir / name, index, index.total_bytes, time.monotonic() - began)


def write_checkpoint_folder(
    path: Path,
    descriptor: Descriptor,
    data: memoryview,
    position: Position | None = None,
    *,
    threads: int | None = None,
) -> CheckpointIndex:  # fmt: skip
    """Write a checkpoint outside any series, in the same order, to a folder that must not exist.

    Args:
        path: The folder to make; its parents are made when missing.
        descriptor, data, threads: As for commit_snapshot.
        position: None for a run of its own.

    Raises:
        InvalidArgument: path exists, or a part of it is no folder. Nothing was changed.
        NoSpace, SaveFailed, OutcomeUnknown, UnstorableState: As for commit_snapshot.
    """
    position = position or Position.alone(uuid.uuid4().hex)
    plan = plan_checkpoint(descriptor)
    try:
        durable.make_dirs(path.parent)
        own_leftovers.remove(path.parent)
        taken = durable.is_taken(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidArgument(
            "a part of the path is a file, not a folder", where=str(path), todo="pick another path"
        ) from error
    except OSError as error:
        raise save_error(error, _what(descriptor), path) from error
    if taken:
        raise InvalidArgument(
            "something is there already", where=str(path), todo="pick another path, or remove it"
        )
    writing = Writing()
    return _Commit(path.parent, path.name, descriptor, data, position, plan, threads, writing, durable).run()


@dataclass(frozen=True, slots=True)
class _Failed:
    """A try that ended badly; `renamed`: only the sync of the name failed."""

    error: Exception
    renamed: bool


@dataclass(frozen=True, slots=True)
class _Commit:
    """One snapshot on its way into folder `parent`, as `name`; written once more after a failed sync."""

    parent: Path
    name: str
    descriptor: Descriptor
    data: memoryview
    position: Position
    plan: CheckpointPlan
    threads: int | None
    writing: Writing
    disk: Disk
    check: Check = lambda: None

    def run(self) -> CheckpointIndex:
        first = self._attempt()
        if isinstance(first, CheckpointIndex):
            return first
        if not first.renamed and not isinstance(first.error, FsyncFailed):
            raise self._final(first.error, unknown=False) from first.error
        _log.warning("snapshot.rewrite step=%d cause=%s", self.descriptor.step, first.error)
        second = self._attempt()
        if isinstance(second, CheckpointIndex):
            return second
        raise self._final(second.error, unknown=first.renamed or second.renamed) from second.error

    def _attempt(self) -> CheckpointIndex | _Failed:
        temp = self.parent / work_folder("tmp", self.position.sequence)
        try:
            index = write_folder(
                temp,
                self.descriptor,
                self.data,
                self.position,
                self.plan,
                threads=self.threads,
                writing=self.writing,
                disk=self.disk,
                check=self.check,
            )
            self.disk.rename_new(temp, self.parent / self.name, sync=False)
        except _FAILURES as error:
            self._drop(temp)
            return _Failed(error, renamed=False)
        except BaseException:  # SIGINT: the caller unwinds, and leaves nothing behind either
            self._drop(temp)
            raise
        durable.crash_point("after-rename")
        try:
            self.disk.fsync_dir(self.parent)
        except OSError as error:
            self._to_trash()
            return _Failed(error, renamed=True)
        durable.crash_point("after-run-sync")
        return index

    def _drop(self, folder: Path) -> None:
        try:
            self.disk.remove_tree(folder)
        except OSError as error:
            _log.warning("snapshot.leftover path=%s cause=%s; removed later", folder, error)
            own_leftovers.note(folder)

    def _to_trash(self) -> None:
        trash = self.parent / work_folder("trash", self.position.sequence)
        try:
            self.disk.rename_new(self.parent / self.name, trash, sync=False)
        except OSError as error:
            _log.warning("snapshot.leftover path=%s cause=%s", self.parent / self.name, error)
            return
        self._drop(trash)

    def _final(self, error: Exception, *, unknown: bool) -> CkptdError:
        # Whoever keeps the error must not keep views into the snapshot's memory: no slot could be closed.
        traceback.clear_frames(error.__traceback__)
        failure = save_error(error, _what(self.descriptor), self.parent)
        if not unknown:
            return failure
        return OutcomeUnknown(
            "the checkpoint's name could not be made durable", where=str(self.parent / self.name),
            seen=failure.seen or failure.what,
            todo="check the disk; after a power cut it may or may not be there",
        )  # fmt: skip


def _what(descriptor: Descriptor) -> str:
    return f"step {descriptor.step} could not be written"


def _free_name(run_dir: Path, step: int, repeat: int | None) -> str:
    """step-N, or step-N.k with k above all that are there; a name held by anything at all isn't free.

    `repeat` is k where the caller knows the checkpoints that are there; names held by anything else are passed over.
    """
    if repeat is None:
        prefix = step_folder(step)
        found = [parse_step_folder(name) for name in os.listdir(run_dir) if name.startswith(prefix)]
        repeat = max((held[1] for held in found if held is not None and held[0] == step), default=0) + 1
    while durable.is_taken(run_dir / step_folder(step, repeat)):
        repeat += 1
    return step_folder(step, repeat)
