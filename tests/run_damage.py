"""What befalls a run's folder: damage, marks, quarantine, going back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptd.disk.run_index import Mark, RunIndex, write_run_index
from ckptd.disk.series import read_series
from ckptd.disk.verification import check
from ckptd.names import quarantine_folder, work_folder
from snapshots import RUN_ID, Writer


def quarantine(writer: Writer, name: str, sequence: int) -> None:
    folder = writer.run_dir / "quarantine"
    folder.mkdir(exist_ok=True)
    (writer.run_dir / name).rename(folder / quarantine_folder(name, sequence))


def mark(writer: Writer, *names: str, **changes: Any) -> None:
    entries = {entry.name: entry for entry in read_series(writer.root, writer.run).entries}
    marks = []
    for name in names:
        report = check(entries[name].path)
        assert report.sequence is not None
        fields = {
            "name": name, "sequence": report.sequence, "index_sha256": report.index_sha256,
            "stat_signature": report.stat_signature,
        }  # fmt: skip
        marks.append(Mark(**(fields | changes)))
    write_run_index(writer.run_dir, RunIndex(run=writer.run, run_id=RUN_ID, marks=tuple(marks)))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one byte short": lambda path: truncate(path / "model.shard-000.pt"),
    "empty": lambda path: os.truncate(path / "model.shard-001.pt", 0),
    "a shard gone": lambda path: (path / "model.shard-000.pt").unlink(),
    "index gone": lambda path: (path / "index.json").unlink(),
    "a bit in the data": lambda path: flip(path / "model.shard-000.pt", 400),
    "a bit in a header": lambda path: flip(path / "meta.pt", 2),
    "a bit in the index": lambda path: flip(path / "index.json", 300),
    "a bit in the table": lambda path: flip(path / "tensors.json", 20),
    "only a temp folder left": lambda path: path.rename(path.with_name(work_folder("tmp", 9))),
}


def rewound(writer: Writer) -> Any:
    """100 … 700, back to 300, 400 again by another client."""
    for step in range(100, 800, 100):
        writer.commit(step)
    return writer.commit(400, client_id="ef" * 16, base_sequence=3)
