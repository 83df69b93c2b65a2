"""index.json of a run: marks of what was verified, and summaries. A cache, and never more.

Missing, empty or wrong it is rebuilt from the folders, and nothing is lost, forgotten or deleted by that. A
mark counts only while name, sequence, index_sha256 and stat signature are those of the folder that is there.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.disk import durable
from ckptd.disk.folder_files import read_small_file
from ckptd.errors import CorruptCheckpoint
from ckptd.format.fields import Fields
from ckptd.format.strict_json import canonical, float_from_json, float_to_json, parse
from ckptd.limits import MAX_RUN_INDEX_BYTES
from ckptd.names import INDEX_FILE

SCHEMA: Final = "ckpt.v2-run-index"
_MOST: Final = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A checkpoint that was verified.

    Attributes:
        name, sequence, index_sha256: Which one.
        stat_signature: Of its folder when it was read (verification.stat_signature).
        how: How it was read: "direct", "dontneed" or "cached".
        verified_at: Unix seconds; information only.
    """

    name: str
    sequence: int
    index_sha256: str
    stat_signature: str
    how: str = ""
    verified_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One checkpoint in a line, for people and for tools that don't want to open every folder."""

    name: str
    step: int
    sequence: int
    saved_at: float
    bytes: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIndex:
    """The run's index.

    Attributes:
        run: Its name.
        run_id: Its id; "" before its birth.
        highest_sequence: The highest ever given; only ever raises the next one.
        marks: What was verified.
        checkpoints: What was there.
    """

    run: str
    run_id: str = ""
    highest_sequence: int = 0
    marks: tuple[Mark, ...] = ()
    checkpoints: tuple[Summary, ...] = ()


def read_run_index(run_dir: Path) -> RunIndex | None:
    """The run's index, or None when there is none or it can't be relied on."""
    where = str(run_dir / INDEX_FILE)
    try:
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            data = read_small_file(folder, INDEX_FILE, where, MAX_RUN_INDEX_BYTES)
        finally:
            os.close(folder)
        return run_index_from_bytes(data, where)
    except (OSError, CorruptCheckpoint):
        return None  # a cache: to have none costs a rebuild, to trust a bad one costs checkpoints


def write_run_index(run_dir: Path, index: RunIndex) -> None:
    """Replace the run's index. The caller holds the root's lock. Not synced: a cache needs no fsync.

    Raises:
        OSError: The old one is untouched.
    """
    durable.replace_file(run_dir / INDEX_FILE, [run_index_to_bytes(index)], sync=False)


def run_index_to_bytes(index: RunIndex) -> bytes:
    """The file's bytes, with a hash over the rest."""
    obj = {
        "schema": SCHEMA,
        "run": index.run,
        "run_id": index.run_id,
        "highest_sequence": index.highest_sequence,
        "marks": [asdict(mark) for mark in index.marks],
        "checkpoints": [_summary_to_json(summary) for summary in index.checkpoints],
    }
    return canonical(obj | {"sha256": hashlib.sha256(canonical(obj)).hexdigest()})


def run_index_from_bytes(data: bytes, where: str) -> RunIndex:
    """Read and check.

    Raises:
        CorruptCheckpoint: Not one unchanged run index of this version.
    """
    fields = Fields(parse(data, where=where, max_bytes=MAX_RUN_INDEX_BYTES), where)
    if fields.text("schema") != SCHEMA:
        raise CorruptCheckpoint("unknown schema", where=where, wanted=SCHEMA)
    index = RunIndex(
        run=fields.text("run"), run_id=fields.text("run_id"),
        highest_sequence=fields.count("highest_sequence"),
        marks=tuple(map(_mark, fields.objects("marks", _MOST))),
        checkpoints=tuple(map(_summary, fields.objects("checkpoints", _MOST))),
    )  # fmt: skip
    fields.hexdigest("sha256")
    fields.end()
    if run_index_to_bytes(index) != data:
        raise CorruptCheckpoint("the run's index was changed", where=where)
    return index


def _mark(fields: Fields) -> Mark:
    mark = Mark(
        name=fields.text("name"), sequence=fields.count("sequence"),
        index_sha256=fields.hexdigest("index_sha256"), stat_signature=fields.text("stat_signature"),
        how=fields.text("how"), verified_at=fields.number("verified_at"),
    )  # fmt: skip
    fields.end()
    return mark


def _summary_to_json(summary: Summary) -> dict[str, Any]:
    return asdict(summary) | {
        "saved_at": float(summary.saved_at),
        "metrics": {name: float_to_json(value) for name, value in summary.metrics.items()},
    }


def _summary(fields: Fields) -> Summary:
    metrics = fields.by_name("metrics", _MOST)
    summary = Summary(
        name=fields.text("name"), step=fields.count("step"), sequence=fields.count("sequence"),
        saved_at=fields.number("saved_at"), bytes=fields.count("bytes"),
        metrics={name: float_from_json(value, where=fields.where) for name, value in metrics.items()},
    )  # fmt: skip
    fields.end()
    return summary
