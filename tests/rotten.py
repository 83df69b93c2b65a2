"""Rot as a disk leaves it: other bytes, and nothing that a look at the folder would show."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from ckptd.disk.run_index import read_run_index, write_run_index
from ckptd.disk.verification import stat_signature


def read_long_ago(run_dir: Path, *names: str, s: float = 30 * 86_400, at: float | None = None) -> None:
    """The marks of these say that they were read so many seconds ago (or then), as they look now."""
    index = read_run_index(run_dir)
    assert index is not None
    when = time.time() - s if at is None else at

    def older(mark: msgspec.Struct) -> msgspec.Struct:
        look = stat_signature(run_dir / mark.name)  # type: ignore[attr-defined]
        return msgspec.structs.replace(mark, stat_signature=look, verified_at=when)

    marks = tuple(older(mark) if mark.name in names else mark for mark in index.marks)
    write_run_index(run_dir, msgspec.structs.replace(index, marks=marks))


def rot(path: Path, at: int | None = None) -> None:
    """One bit of a file of a checkpoint that was read long ago."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
    read_long_ago(path.parent.parent, path.parent.name)
