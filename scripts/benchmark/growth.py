"""What must not grow: seconds a tensor with their number, seconds a call with the number of checkpoints in a root."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import ours
import page_cache
from rounds import Course, say
from settings import Settings
from state import many

import ckptd
from ckptd.disk.run_index import Mark, RunIndex, Summary, write_run_index
from ckptd.disk.verification import stat_signature
from ckptd.format.records import CheckpointIndex, index_to_bytes, read_index
from ckptd.names import INDEX_FILE, step_folder

TENSORS, CHECKPOINTS = "number of tensors", "number of checkpoints"

_RUN = "r"
_LOOK_EVERY_S = 0.0002


def measure_tensors(course: Course, settings: Settings, _work: Path, root: Path) -> None:
    """One client for each number of tensors of 256 bytes, in turn."""
    contestants = [
        ours.Ours(f"{count}", f"{count} tensors of 256 bytes", root, many(count), f"n{count}")
        for count in settings.tensors
    ]
    course.run(TENSORS, contestants, settings.tensor_rounds, settings.warmups)


def measure_checkpoints(course: Course, settings: Settings, work: Path, _root: Path) -> None:
    """One root with its daemon for each number of checkpoints, in turn."""
    with ExitStack() as stack:
        roots = []
        for count in settings.checkpoints:
            say(f"{CHECKPOINTS}: making {count}")
            root = work / f"root-{count}"
            fill(root, count)
            began = time.perf_counter()
            stack.enter_context(ours.daemon(root, keep_last=count))
            course.samples.add(CHECKPOINTS, f"{count}", {"start": time.perf_counter() - began})
            roots.append(Root(root, count))
        course.run(CHECKPOINTS, roots, settings.checkpoint_rounds, settings.warmups)


class Root:
    """A root that holds `count` checkpoints, all verified, before and after each measure."""

    ours = True

    def __init__(self, root: Path, count: int) -> None:
        self.name, self.about = f"{count}", f"{count} checkpoints of a few KiB, all verified"
        self._root, self._count, self._step = root, count, count
        self._client = ckptd.Client(root=root, run=_RUN, daemon="attach", on_error="raise")
        self._state = tiny_state()
        self._client.restore(self._state)
        self._daemon = ours.daemon_pid(root)

    def measure(self) -> dict[str, float]:
        """commit: until durable. retention: from then until verified and the oldest gone, when the daemon gets round to
        it; what both took of its CPU time. latest: the command, the call."""
        self._step += 1
        oldest = self._root / _RUN / step_folder(self._step - self._count)
        used = cpu_seconds(self._daemon)
        began = time.perf_counter()
        ticket = self._client.snapshot(self._step, self._state)
        ticket.wait("committed", timeout_s=ours.PATIENCE_S)
        committed = time.perf_counter()
        ticket.wait("verified", timeout_s=ours.PATIENCE_S)
        while oldest.exists():
            if time.perf_counter() - committed > ours.PATIENCE_S:
                raise RuntimeError("retention doesn't come to its end")
            time.sleep(_LOOK_EVERY_S)
        used, gone = cpu_seconds(self._daemon) - used, time.perf_counter()
        ours.command("latest", "--root", self._root, "--run", _RUN)
        asked = time.perf_counter()
        found = ckptd.latest_valid(self._root, _RUN)
        called = time.perf_counter()
        if found is None or found.step != self._step:
            raise RuntimeError(f"the latest is {found}, not step {self._step}")
        return {
            "commit": committed - began, "retention": gone - committed, "daemon's CPU": used,
            "latest, command": asked - gone, "latest_valid()": called - asked,
        }  # fmt: skip

    def settle(self) -> None:
        """Let the disk come to rest."""
        page_cache.sync_file_system(self._root)

    def close(self) -> None:
        """Leave."""
        self._client.close()


# --- making many checkpoints ----------------------------------------------------------------------


def fill(root: Path, count: int) -> None:
    """Make `count` checkpoints that pass every check, quickly: without a sync in between, and listed as verified in
    the run's index without a look at the medium."""
    state = tiny_state()
    with ckptd.Client(root=root, run=_RUN, daemon="off") as client:
        client.snapshot(1, state).wait("committed")
    first = root / _RUN / step_folder(1)
    made = [(first, read_index(first))]
    with mock.patch.object(os, "fsync", lambda _fd: None):
        for number in range(2, count + 1):
            made.append(_next(*made[-1], state, number))
    page_cache.sync_file_system(root)
    if not (report := ckptd.verify(made[-1][0])).ok:
        raise RuntimeError(f"what was made is no good: {report}")
    rows = [
        Summary(
            name=folder.name, step=index.step, sequence=index.sequence, saved_at=index.saved_at,
            bytes=index.total_bytes, metrics={},
        )
        for folder, index in made
    ]  # fmt: skip
    cache = RunIndex(
        run=_RUN, run_id=made[0][1].run_id, highest_sequence=count,
        marks=tuple(_mark(*each) for each in made), checkpoints=tuple(rows),
    )  # fmt: skip
    write_run_index(root / _RUN, cache)


def cpu_seconds(pid: int) -> float:
    """CPU time that all threads of a process have used."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text("ascii").split()[0]) for task in tasks) / 1e9


def tiny_state() -> dict[str, Any]:
    """A few KiB."""
    return {"model": many(8).live["model"], "train": ckptd.TrainState()}


def _next(
    before: Path, index: CheckpointIndex, state: dict[str, Any], number: int
) -> tuple[Path, CheckpointIndex]:
    """A checkpoint saved outside of any run, and then given the place in this one behind the one before."""
    folder = ckptd.save(before.parent / step_folder(number), state, step=number)
    alone = read_index(folder)
    placed = replace(
        alone, run=index.run, run_id=index.run_id, client_id=index.client_id, snapshot=number,
        sequence=number, parent=number - 1, lineage=((1, number),), index_sha256="",
    )  # fmt: skip
    (folder / INDEX_FILE).write_bytes(index_to_bytes(placed))
    return folder, read_index(folder)


def _mark(folder: Path, index: CheckpointIndex) -> Mark:
    return Mark(
        name=folder.name, sequence=index.sequence, index_sha256=index.index_sha256,
        stat_signature=stat_signature(folder), how="direct", verified_at=time.time(),
    )  # fmt: skip
