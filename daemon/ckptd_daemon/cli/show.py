"""`ckptd show`: what one checkpoint holds, by its index and, on request, its tensor table. Hashes no data."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from ckptd.disk.folder_files import read_small_file
from ckptd.disk.in_quarantine import count_quarantined
from ckptd.errors import CorruptCheckpoint
from ckptd.format.records import CheckpointIndex, TensorRow, read_index, table_from_bytes
from ckptd.limits import MAX_TABLE_BYTES
from ckptd.names import INDEX_FILE, TABLE_FILE
from ckptd.snapshot import keypath
from ckptd_daemon.cli import checkpoint_json, output, selectors, units
from ckptd_daemon.cli.output import Cell


def run(args: argparse.Namespace) -> int:
    """Print it; CorruptCheckpoint when the index (or the table) isn't what was committed."""
    path = selectors.path_of(args, args.selector)
    index, rows = _read(path, args.tensors)
    if args.json:
        output.emit_json("ckpt.v2-show", _as_json(path, index, rows))
        return 0
    output.emit(
        output.table(("", ""), [[Cell(name, colour="dim"), Cell(text)] for name, text in _facts(path, index)])
    )
    output.emit("\n")
    output.emit(output.table(("FILE", "COMPONENT", "BYTES", "PARAMETERS", "SHA-256"), _files(index)))
    if rows is not None:
        output.emit("\n")
        output.emit(
            output.table(("TENSOR", "DTYPE", "SHAPE", "BYTES", "FILE"), [_tensor(row) for row in rows])
        )
    return 0


def _read(path: Path, with_tensors: bool) -> tuple[CheckpointIndex, tuple[TensorRow, ...] | None]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        index = _index(fd, path)
        return index, _table(fd, path, index.tensors_sha256) if with_tensors else None
    finally:
        os.close(fd)


def _index(fd: int, path: Path) -> CheckpointIndex:
    try:
        return read_index(fd, where=str(path))
    except FileNotFoundError as error:
        raise CorruptCheckpoint(
            f"{INDEX_FILE} is missing", where=str(path), todo="no checkpoint of format v2"
        ) from error


def _table(fd: int, path: Path, wanted: str) -> tuple[TensorRow, ...]:
    where = str(path / TABLE_FILE)
    try:
        data = read_small_file(fd, TABLE_FILE, where, MAX_TABLE_BYTES)
    except FileNotFoundError as error:
        raise CorruptCheckpoint("missing", where=where) from error
    if (seen := hashlib.sha256(data).hexdigest()) != wanted:
        raise CorruptCheckpoint("sha256 differs", where=where, seen=seen, wanted=wanted)
    return table_from_bytes(data, where)


def _facts(path: Path, index: CheckpointIndex) -> list[tuple[str, str]]:
    facts = [
        ("path", str(path)),
        ("run", f"{index.run} (id {index.run_id})"),
        ("step", str(index.step)),
        ("sequence", f"{index.sequence}" + ("" if index.parent is None else f", after {index.parent}")),
        ("line", " ".join(f"{low}-{high}" for low, high in index.lineage)),
        ("saved (UTC)", units.show_utc(index.saved_at)),
        ("trained for", units.show_seconds(index.run_seconds)),
        ("layout", f"{index.layout}, {units.show_bytes(index.total_bytes)}"),
        ("by", f"client {index.client_id}, its snapshot {index.snapshot}"),
        ("versions", " ".join(f"{name} {version}" for name, version in sorted(index.versions.items()))),
        ("index sha256", index.index_sha256),
    ]
    if held := count_quarantined(path.parent):
        facts.append(("quarantine", f"holds {held} corrupt of this run; see ckptd list"))
    return facts + [(f"metric {name}", f"{value!r}") for name, value in sorted(index.metrics.items())]


def _files(index: CheckpointIndex) -> list[list[Cell]]:
    return [
        [
            Cell(path),
            Cell(component),
            Cell(str(size), units.show_bytes(size)),
            Cell("" if parameters is None else str(parameters)),
            Cell(sha256, sha256[:16]),
        ]
        for path, component, size, parameters, sha256 in checkpoint_json.files(index)
    ]


def _tensor(row: TensorRow) -> list[Cell]:
    size = Cell(str(row.bytes), units.show_bytes(row.bytes))
    tied = "" if row.alias_of is None else f" = {keypath.show(row.alias_of)}"
    return [
        Cell(keypath.show(row.key) + tied),
        Cell(row.dtype),
        Cell(str(list(row.shape))),
        size,
        Cell(row.file),
    ]


def _as_json(path: Path, index: CheckpointIndex, rows: tuple[TensorRow, ...] | None) -> dict[str, Any]:
    held = count_quarantined(path.parent)
    data = {"name": path.name, "path": str(path), **checkpoint_json.whole(index), "quarantined": held}
    if rows is not None:
        data["tensors"] = [
            {
                "key": keypath.to_json(row.key),
                "file": row.file,
                "dtype": row.dtype,
                "shape": list(row.shape),
                "offset": row.offset,
                "bytes": row.bytes,
                "alias_of": None if row.alias_of is None else keypath.to_json(row.alias_of),
            }
            for row in rows
        ]
    return data
