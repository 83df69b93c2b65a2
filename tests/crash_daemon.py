"""A daemon in this process: the real recovery, adoption, commits, verdicts and retention, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ckptd.disk import lock, slot_folder
from ckptd.disk.commit import Committed, commit_snapshot
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root
from ckptd.disk.verification import check
from ckptd.disk.writing import Writing
from ckptd.format.records import CheckpointIndex
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.slots import Slot, needed_bytes
from ckptd.snapshot.values import TensorRef
from ckptd_daemon.core import recovery
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.streams import Streams
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.budget import Budget
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import read_settings
from crash_recorder import Killed

RUN: Final = "r"
CLIENT: Final = "c" * 32
OTHER: Final = "d" * 32


@dataclass(frozen=True)
class Sealed:
    """A snapshot, by its client; one that was sealed into a slot."""

    client: str
    snapshot: int


@dataclass(frozen=True)
class Acked:
    """A checkpoint that was acknowledged, and its files."""

    sequence: int
    parent: int | None
    name: str
    run_id: str
    snapshot: Sealed
    files: tuple[tuple[str, bytes], ...]

    @classmethod
    def of(cls, path: Path, index: CheckpointIndex) -> Acked:
        snapshot = Sealed(index.client_id, index.snapshot)
        return cls(index.sequence, index.parent, path.name, index.run_id, snapshot, files_in(path))


def root_in(folder: Path) -> Path:
    """Not made beforehand: the first save has to make the folders above durable too."""
    return folder / "fresh" / "root"


def files_in(folder: Path) -> tuple[tuple[str, bytes], ...]:
    return tuple((path.name, path.read_bytes()) for path in sorted(folder.iterdir()))


class _Disk(Disk):
    """Whose jobs are done by whoever asks, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool = False) -> int:
        self._jobs.append((work, done))
        return len(self._jobs)

    def settle(self) -> None:
        while self._jobs:
            work, done = self._jobs.pop(0)
            try:
                result: Any = work()
            except Exception as error:  # as the worker does
                result = error
            self.worker.deliver()
            done(result)


class _Clients(Clients):
    """Notes what is acknowledged."""

    def __init__(self, daemon: Daemon, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._daemon = daemon

    def snapshot_changed(self, snapshot: Snapshot, freed: Slot | None) -> None:
        if snapshot.state is State.COMMITTED:
            self._daemon.told_committed(snapshot)
        super().snapshot_changed(snapshot, freed)


class Marks(Protocol):
    """Whoever is told what is promised; a recorder is one."""

    def mark(self, what: str, about: Any = None) -> None: ...


class Deaf:
    """Nobody."""

    def mark(self, what: str, about: Any = None) -> None:
        """Nothing is noted."""


class Daemon:
    """Opens a root as a start does, and then does what a story asks for.

    Args:
        recorder: Takes the marks.
        folder: What is watched.
    """

    def __init__(self, recorder: Marks, folder: Path) -> None:
        self.recorder = recorder
        self.root = Root.open(root_in(folder), create=True)
        self.run_dir = self.root.run_dir(RUN)
        self.disk = _Disk(self.root, read_settings(self.root.path), catalogue=self._catalogue_of)
        self.catalogue: Catalogue
        self._snapshots: dict[str, int] = {}
        self._sealed = 0

    def __enter__(self) -> Daemon:
        self._lock = RootLock(self.root)
        try:
            self._lock.acquire()
            facts = recovery.open_runs(self.disk, recovery.runs_on_disk(self.root))
            recovery.sweep(self.root)
            if self.root.slot_path.exists():
                self._adopt(facts)
            if not hasattr(self, "catalogue"):
                self.disk.open_run(RUN)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.disk.worker.stop()
        self.disk.close()
        try:
            self._lock.release()
        except Killed:  # recorder.bury() closes what it held open
            lock._held.discard(self._lock)

    def _catalogue_of(self, root: Root, run: str) -> Catalogue:
        self.catalogue = Catalogue(root, run)
        return self.catalogue

    # --- adoption --------------------------------------------------------------------------------

    def _adopt(self, facts: dict[str, Any]) -> None:
        pool = SlotPool(self.root.slot_dir(), rooms=lambda _: [])
        slot_folder.record_root(pool.folder, self.root.path)
        maker = Worker("never started")
        try:
            clients = _Clients(
                self, daemon_id="0" * 16, disk=self.disk, pool=pool, maker=maker,
                send=lambda *_: False, say=lambda _: None, verify=lambda *_: None, budget=Budget(),
            )  # fmt: skip
            clients.pipeline = Pipeline(self.disk, pool, clients, lambda: 0.0)
            clients.streams = Streams(
                clients.sessions, maker, maker, lambda *_: False, lambda: 0.0, clients.staged
            )
            clients.streams.pipeline = clients.pipeline
            for run, known in facts.items():
                clients.pipeline.opened(run, known)
            recovery.adopt(self.disk, clients, pool)
            for snapshot in clients.pipeline.unwritten():
                self.recorder.mark("begun", snapshot.sequence)
            self.disk.settle()
        finally:
            maker.stop()
            pool.close()

    def told_committed(self, snapshot: Snapshot) -> None:
        self._acknowledge(snapshot.client_id, snapshot.number)

    def _acknowledge(self, client: str, number: int) -> None:
        assert self.disk.find(RUN, client, number) is not None  # has it entered in the catalogue
        entry = self.catalogue.find(client, number)
        assert entry is not None and entry.index is not None
        self.recorder.mark("acked", Acked.of(entry.path, entry.index))

    # --- what a story asks for -------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        shards: int = 0,
        base: int | None = None,
        client: str = CLIENT,
        verify: bool = False,
        writing: Writing | None = None,
        begins_line: bool = False,
    ) -> Committed:
        """Commit and acknowledge."""
        snapshot = self._descriptor(step, shards, base, client, begins_line)
        sequence = self.catalogue.highest_sequence + 1
        position = self.catalogue.position_for(snapshot, sequence)
        self.recorder.mark("begun", sequence)
        committed = commit_snapshot(
            self.run_dir, snapshot, data_of(step), position, threads=1, writing=writing
        )
        self.recorder.mark("acked", Acked.of(committed.path, committed.index))
        self.catalogue.added(committed)
        if verify:
            self.verify(committed.name)
        return committed

    def write(self, slot: Slot, step: int, *, client: str = CLIENT, survives: bool = True) -> None:
        """Seal a snapshot into a slot, have the disk thread's job make it durable and free the slot; acknowledge."""
        descriptor = self._descriptor(step, 0, None, client, False)
        sequence = self.catalogue.highest_sequence + 1
        self.recorder.mark("begun", sequence)
        seal(slot, descriptor, step)
        if survives:
            self.recorder.mark("sealed", Sealed(client, descriptor.snapshot))
        slot.accept(sequence)
        self.disk.write(slot, sequence, lambda _step: None)
        self._acknowledge(client, descriptor.snapshot)

    def seal(self, step: int, *, client: str = CLIENT) -> None:
        """A snapshot sealed into a new slot, and left there: who adopts it gives it the next sequence."""
        descriptor = self._descriptor(step, 0, None, client, False)
        slot = self.slot(client)
        self._sealed += 1
        self.recorder.mark("begun", self.catalogue.highest_sequence + self._sealed)
        seal(slot, descriptor, step)
        slot.close()
        self.recorder.mark("sealed", Sealed(client, descriptor.snapshot))

    def slot(self, client: str = CLIENT) -> Slot:
        """A new slot in shared memory; its owner is no process that lives."""
        pool = SlotPool(self.root.slot_dir(), rooms=lambda _: [])
        (slot,) = pool.make(client, RUN, (0, 0), 1, needed_bytes(128, 8192))
        return slot

    def verify(self, name: str) -> str:
        verdict = self.catalogue.apply_report(check(self.run_dir / name))
        self.catalogue.write_index()
        return verdict

    def prune(self, keep_last: int, going: set[int]) -> None:
        """Retention, which may take these sequences and no other."""
        self.recorder.mark("may go", frozenset(going))
        removed = self.catalogue.apply_retention(RetentionPolicy(keep_last=keep_last))
        assert {one.sequence for one in removed} == going, removed
        self.recorder.mark("gone", frozenset(going))
        self.catalogue.write_index()

    def _descriptor(
        self, step: int, shards: int, base: int | None, client: str, begins_line: bool
    ) -> Descriptor:
        number = self._snapshots[client] = self._snapshots.get(client, 0) + 1
        tensors = tuple(
            TensorSpec(
                path=("model", name), dtype="float32", itemsize=4, shape=(16,), stride=None, offset=at * 64, nbytes=64
            )
            for at, name in enumerate("wb")
        )  # fmt: skip
        return Descriptor(
            run=RUN, client_id=client, snapshot=number, step=step, saved_at=1.0, run_seconds=float(step),
            base_sequence=base, base_snapshot=0, begins_line=begins_line, metrics={}, versions={"ckptd": "0"},
            state={"model": {"w": TensorRef(0), "b": TensorRef(1)}, "train": {"step": step}}, tensors=tensors,
            data_bytes=128, sharding=Sharding(shards=shards) if shards else Sharding(),
        )  # fmt: skip


def data_of(step: int) -> memoryview:
    return memoryview(bytes((step + at) % 251 for at in range(128)))


def seal(slot: Slot, descriptor: Descriptor, step: int) -> None:
    slot.begin(descriptor.client_id, descriptor.run, descriptor.snapshot)
    slot.data[:128] = data_of(step)
    slot.seal(encode(descriptor), 128)
