"""A run of small real checkpoints for tests of the series: committed by the real writer, without torch."""

from __future__ import annotations

import os
from pathlib import Path

from ckptd.disk.commit import Committed, commit_snapshot
from ckptd.disk.rootdir import Root
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.values import TensorRef
from ckptd_daemon.series.catalogue import Catalogue

CLIENT = "c" * 32


def descriptor(
    step: int, snapshot: int, *, run: str = "r", client_id: str = CLIENT, base: int | None = None,
    base_snapshot: int = 0, metrics: dict[str, float] | None = None, shards: int | None = None,
    begins_line: bool = False,
) -> Descriptor:  # fmt: skip
    """A snapshot with one tensor of 64 bytes."""
    tensor = TensorSpec(
        path=("model", "w"), dtype="float32", itemsize=4, shape=(16,), stride=None, offset=0, nbytes=64
    )
    return Descriptor(
        run=run, client_id=client_id, snapshot=snapshot, step=step, saved_at=1.0, run_seconds=float(step),
        base_sequence=base, base_snapshot=base_snapshot, begins_line=begins_line, metrics=metrics or {},
        versions={"ckptd": "0", "torch": "0", "numpy": "0", "python": "0"},
        state={"model": {"w": TensorRef(0)}, "train": {"step": step}}, tensors=(tensor,), data_bytes=64,
        sharding=Sharding(shards=shards) if shards else Sharding(),
    )  # fmt: skip


class Made:
    """A root with one run and its catalogue; commits like the daemon does."""

    def __init__(self, path: Path, run: str = "r") -> None:
        self.root = Root.open(path, create=True)
        self.run = run
        self.dir = self.root.run_dir(run)
        self.snapshots = 0
        self.reopen()

    def reopen(self) -> list[str]:
        """As after a restart of the daemon; the problems it found."""
        self.catalogue = Catalogue(self.root, self.run)
        self.problems = self.catalogue.open()
        return self.problems

    def commit(
        self, step: int, *, base: int | None = None, base_snapshot: int = 0, client_id: str = CLIENT,
        verify: bool = False, metrics: dict[str, float] | None = None, shards: int | None = None,
        begins_line: bool = False,
    ) -> Committed:  # fmt: skip
        """Commit a snapshot of this step as the daemon would."""
        self.snapshots += 1
        snap = descriptor(
            step, self.snapshots, run=self.run, base=base, base_snapshot=base_snapshot, client_id=client_id,
            metrics=metrics, shards=shards, begins_line=begins_line,
        )  # fmt: skip
        position = self.catalogue.position_for(snap, self.catalogue.highest_sequence + 1)
        data = memoryview(os.urandom(64))
        committed = commit_snapshot(self.dir, snap, data, position, threads=1)
        self.catalogue.added(committed)
        if verify:
            assert self.verify(committed.name) == "verified"
        return committed

    def verify(self, name: str) -> str:
        """Have one checked, here and now."""
        from ckptd.disk.verification import check

        return self.catalogue.apply_report(check(self.dir / name))

    @property
    def names(self) -> list[str]:
        """The checkpoint folders there are."""
        return sorted(p.name for p in self.dir.iterdir() if p.name.startswith("step-"))


def flip_byte(path: Path, offset: int | None = None, *, keep_times: bool = False) -> None:
    """Change one bit in the middle (or at offset) of a file, in place."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    if keep_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
