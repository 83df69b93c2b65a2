"""What a daemon does to a root, told with marks of what it has promised when."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.disk import lock
from ckptd.disk.commit import Committed, commit_snapshot
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root
from ckptd.disk.verification import check
from ckptd.disk.write_mode import WriteMode
from ckptd.disk.writing import Writing
from ckptd.names import QUARANTINE_DIR
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.values import TensorRef
from ckptd_daemon.core import recovery
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import read_settings
from crash_trace import Killed, Recorder

RUN: Final = "r"
CLIENT: Final = "c" * 32
OTHER: Final = "d" * 32


@dataclass(frozen=True)
class Acked:
    """A checkpoint that was acknowledged, and its files."""

    sequence: int
    parent: int | None
    name: str
    run_id: str
    files: tuple[tuple[str, bytes], ...]


def root_in(folder: Path) -> Path:
    """Not made beforehand: the first save has to make the folders above durable too."""
    return folder / "fresh" / "root"


def files_in(folder: Path) -> tuple[tuple[str, bytes], ...]:
    return tuple((path.name, path.read_bytes()) for path in sorted(folder.iterdir()))


class Daemon:
    """As the daemon opens, commits, verifies and prunes; in this process.

    Args:
        recorder: Takes the marks.
        folder: What is watched.
    """

    def __init__(self, recorder: Recorder, folder: Path) -> None:
        self._recorder = recorder
        self.root = Root.open(root_in(folder), create=True)
        self._snapshots = 0

    def __enter__(self) -> Daemon:
        self._lock = RootLock(self.root)
        try:
            self._lock.acquire()
            disk = Disk(self.root, read_settings(self.root.path))
            try:
                recovery.open_runs(disk, recovery.runs_on_disk(self.root))
                recovery.sweep(self.root)
            finally:
                disk.worker.stop()
            self.open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._lock.release()
        except Killed:  # recorder.bury() closes what it held open
            lock._held.discard(self._lock)

    def open(self) -> None:
        self.catalogue = Catalogue(self.root, RUN)
        self.catalogue.open()
        self.run_dir = self.root.run_dir(RUN)

    def save(
        self,
        step: int,
        *,
        shards: int = 0,
        base: int | None = None,
        client: str = CLIENT,
        verify: bool = False,
        writing: Writing | None = None,
    ) -> Committed:
        """Commit and acknowledge."""
        self._snapshots += 1
        snapshot = _descriptor(step, self._snapshots, shards, base, client)
        sequence = self.catalogue.highest_sequence + 1
        position = self.catalogue.position_for(snapshot, sequence)
        self._recorder.mark("begun", sequence)
        data = memoryview(bytes((step + at) % 251 for at in range(128)))
        committed = commit_snapshot(self.run_dir, snapshot, data, position, threads=1, writing=writing)
        index = committed.index
        self._recorder.mark(
            "acked",
            Acked(index.sequence, index.parent, committed.name, index.run_id, files_in(committed.path)),
        )
        self.catalogue.added(committed)
        if verify:
            self.verify(committed.name)
        return committed

    def verify(self, name: str) -> str:
        verdict = self.catalogue.apply_report(check(self.run_dir / name))
        self.catalogue.write_index()
        return verdict

    def prune(self, keep_last: int, going: set[int]) -> None:
        """Retention, which may take these sequences and no other."""
        self._recorder.mark("may go", frozenset(going))
        removed = self.catalogue.apply_retention(RetentionPolicy(keep_last=keep_last))
        assert {one.sequence for one in removed} == going, removed
        self.catalogue.write_index()


def _descriptor(step: int, snapshot: int, shards: int, base: int | None, client: str) -> Descriptor:
    tensors = tuple(
        TensorSpec(
            path=("model", name), dtype="float32", itemsize=4, shape=(16,), stride=None, offset=at * 64, nbytes=64
        )
        for at, name in enumerate("wb")
    )  # fmt: skip
    return Descriptor(
        run=RUN, client_id=client, snapshot=snapshot, step=step, saved_at=1.0, run_seconds=float(step),
        base_sequence=base, base_snapshot=0, metrics={}, versions={"ckptd": "0"},
        state={"model": {"w": TensorRef(0), "b": TensorRef(1)}, "train": {"step": step}}, tensors=tensors,
        data_bytes=128, sharding=Sharding(shards=shards) if shards else Sharding(),
    )  # fmt: skip


def first_save(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        daemon.save(1)


def three_saves_in_shards(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20, 30):
            daemon.save(step, shards=2)


def saves_in_the_mode_of_large_files(recorder: Recorder, folder: Path) -> None:
    """As large states are written: the mode is found out, then whole pages and a cut."""
    with Daemon(recorder, folder) as daemon:
        for shards, mode in ((2, WriteMode()), (0, WriteMode("direct"))):
            daemon.save(10 + shards, shards=shards, writing=Writing(mode=mode, large_from_bytes=0))


def the_same_step_again(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        daemon.save(10)
        daemon.save(10)


def retention(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20, 30):
            daemon.save(step, verify=True)
        daemon.prune(1, {1, 2})
        daemon.save(40, verify=True)
        daemon.prune(1, {3})


def a_rewind(recorder: Recorder, folder: Path) -> None:
    """Steps 10, 20, 30, back to 10, save 15: the new line's head is the latest, whatever is cut off."""
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20, 30):
            daemon.save(step, verify=True)
        daemon.save(15, base=1, client=OTHER, verify=True)
        daemon.prune(2, {2, 3})


def quarantine(recorder: Recorder, folder: Path) -> None:
    with Daemon(recorder, folder) as daemon:
        daemon.save(10, verify=True)
        bad = daemon.save(20)
        recorder.mark("condemned", bad.index.sequence)
        damage(bad.path / "ckpt.pt")
        assert daemon.verify(bad.name) == "corrupt"
        assert (daemon.run_dir / QUARANTINE_DIR).is_dir()
        daemon.save(30)


def damage(file: Path) -> None:
    """A bit flips on the medium; through the recorder, which has to know of it."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    fd = os.open(file, os.O_WRONLY)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)


def a_lost_index(recorder: Recorder, folder: Path) -> None:
    """The run's index goes between two starts: nothing is deleted, and the next one lists all."""
    with Daemon(recorder, folder) as daemon:
        for step in (10, 20):
            daemon.save(step, verify=True)
    (root_in(folder) / RUN / "index.json").unlink()
    with Daemon(recorder, folder) as daemon:
        for name in daemon.catalogue.unverified():
            daemon.verify(name)
        daemon.save(30, verify=True)
        daemon.prune(1, {1, 2})


def killed_before(recorder: Recorder, folder: Path, ops: int) -> None:
    """A first save whose process is killed after so many operations, and one by the next process."""
    recorder.dies_at = ops
    _two_processes(recorder, folder)


def killed_with_its_first_folder(recorder: Recorder, folder: Path) -> None:
    """The next process finds folders above the root that nobody synced."""
    recorder.dies_after = "fresh"
    _two_processes(recorder, folder)


def killed_with_its_birth(recorder: Recorder, folder: Path) -> None:
    """The next process finds the run's birth, which nobody synced."""
    recorder.dies_after = "-birth-"
    _two_processes(recorder, folder)


def _two_processes(recorder: Recorder, folder: Path) -> None:
    with contextlib.suppress(Killed):
        first_save(recorder, folder)
    recorder.bury()
    first_save(recorder, folder)


STORIES: Final[dict[str, Callable[[Recorder, Path], None]]] = {
    story.__name__: story
    for story in (
        first_save, three_saves_in_shards, saves_in_the_mode_of_large_files, the_same_step_again, retention,
        a_rewind, quarantine, a_lost_index, killed_with_its_first_folder, killed_with_its_birth,
    )
}  # fmt: skip
