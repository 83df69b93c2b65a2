"""Small snapshots for tests of what is on disk: descriptors without torch, and commits in a private root."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from ckptd.disk.commit import Committed, commit_snapshot
from ckptd.disk.decisions import read_decisions, write_birth
from ckptd.disk.durable import make_dirs
from ckptd.disk.rootdir import Root
from ckptd.disk.series import position_after, read_series
from ckptd.snapshot.descriptor import Descriptor, Sharding, TensorSpec
from ckptd.snapshot.values import TensorRef

RUN_ID = "ab" * 16
CLIENT = "cd" * 16

_numbers = itertools.count(1)


def spec(path: tuple[Any, ...], dtype: str, itemsize: int, shape: tuple[int, ...], offset: int) -> TensorSpec:
    return TensorSpec(
        path=path, dtype=dtype, itemsize=itemsize, shape=shape, stride=None, offset=offset,
        nbytes=itemsize * math.prod(shape),
    )  # fmt: skip


def descriptor(step: int, **changes: Any) -> Descriptor:
    """A snapshot of two tensors (64 float32 and 16 int64) and a counter."""
    fields: dict[str, Any] = {
        "run": "default", "client_id": CLIENT, "snapshot": next(_numbers), "step": step, "saved_at": 1.5,
        "run_seconds": 2.0, "base_sequence": None, "metrics": {"loss": 1.0 / (step + 1)},
        "versions": {"ckptd": "0"}, "data_bytes": 512,
        "state": {"model": {"w": TensorRef(0), "b": TensorRef(1)}, "train": {"step": step}},
        "tensors": (
            spec(("model", "w"), "float32", 4, (8, 8), offset=0),
            spec(("model", "b"), "int64", 8, (16,), offset=256),
        ),
    }  # fmt: skip
    return Descriptor(**(fields | changes))


def sharded(step: int, **changes: Any) -> Descriptor:
    return descriptor(step, sharding=Sharding(shards=2), **changes)


def data_for(step: int) -> memoryview:
    return memoryview(bytes((step + at) % 251 for at in range(512)))


class Writer:
    """Commits snapshots to one run as a client would, one after the other."""

    def __init__(self, root: Path, run: str = "default", client_id: str = CLIENT) -> None:
        self.root = Root.open(root, create=True)
        self.run, self.client_id = run, client_id
        self.run_dir = self.root.run_dir(run)
        make_dirs(self.run_dir)
        if read_decisions(self.run_dir).birth_run_id is None:
            write_birth(self.run_dir, RUN_ID)

    def position(self, d: Descriptor) -> Any:
        series = read_series(self.root, self.run)
        return position_after(series, d, series.next_sequence, run_id=RUN_ID)

    def commit(self, step: int, *, make: Any = descriptor, **changes: Any) -> Committed:
        d = make(step, **({"client_id": self.client_id, "run": self.run} | changes))
        return commit_snapshot(self.run_dir, d, data_for(step), self.position(d))
