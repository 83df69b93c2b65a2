"""index.json of a run: marks of what was verified, and summaries. A cache, and never more.

Missing, empty or wrong it is rebuilt from the folders, and nothing is lost, forgotten or deleted by that. A
mark counts only while name, sequence, index_sha256 and stat signature are those of the folder that is there.

It is written anew at every commit and read by every question, for runs of 10,000 checkpoints too: so each
checkpoint is a short row, and typed code reads it. Its bytes must be the one spelling of what they say, by
which a key given twice, a number out of range or any other changed byte shows.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ckptd.disk import durable
from ckptd.disk.folder_files import read_small_file
from ckptd.errors import CorruptCheckpoint
from ckptd.format.strict_json import float_from_json, float_to_json
from ckptd.limits import MAX_RUN_INDEX_BYTES
from ckptd.names import INDEX_FILE

SCHEMA: Final = "ckpt.v2-run-index.2"

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Mark(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A checkpoint that was verified.

    Attributes:
        name, sequence, index_sha256: Which one.
        stat_signature: Of its folder when it was read (verification.stat_signature).
        how: How it was read: "direct", "dontneed" or "cached".
        verified_at: Unix seconds; information only.
    """

    name: str
    sequence: _Count
    index_sha256: _Hash
    stat_signature: str
    how: str = ""
    verified_at: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """One checkpoint, for people and for tools that don't want to open every folder.

    Attributes:
        name, step, sequence, saved_at, metrics: As its index has them.
        bytes: Of all its files but the index.
        identity: Of its folder (entry.folder_identity): another one of that name has another.
    """

    name: str
    step: _Count
    sequence: _Count
    saved_at: float
    bytes: _Count
    metrics: dict[str, float]
    identity: str = ""


class RunIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    highest_sequence: _Count = 0
    marks: tuple[Mark, ...] = ()
    checkpoints: tuple[Summary, ...] = ()


class _StoredSummary(Summary, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    metrics: dict[str, float | dict[str, str]]  # type: ignore[assignment]  # JSON has no NaN: it is tagged


class _File(RunIndex, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    sha256: str
    checkpoints: tuple[_StoredSummary, ...]


_spell = msgspec.json.Encoder(order="deterministic").encode
_decoder = msgspec.json.Decoder(_File)


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
    unsigned = _File(
        schema=SCHEMA, sha256="", run=index.run, run_id=index.run_id, highest_sequence=index.highest_sequence,
        marks=index.marks, checkpoints=tuple(map(_stored, index.checkpoints)),
    )  # fmt: skip
    return _signed(unsigned)


def run_index_from_bytes(data: bytes, where: str) -> RunIndex:
    """Read and check.

    Raises:
        CorruptCheckpoint: Not one unchanged run index of this version.
    """
    try:
        file = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint("not a run's index", where=where, seen=str(error)[:200]) from error
    if file.schema != SCHEMA:
        raise CorruptCheckpoint("unknown schema", where=where, seen=file.schema[:80], wanted=SCHEMA)
    if _signed(msgspec.structs.replace(file, sha256="")) != data:
        raise CorruptCheckpoint("the run's index was changed", where=where)
    return RunIndex(
        run=file.run, run_id=file.run_id, highest_sequence=file.highest_sequence, marks=file.marks,
        checkpoints=tuple(_plain(summary, where) for summary in file.checkpoints),
    )  # fmt: skip


def _signed(unsigned: _File) -> bytes:
    sha256 = hashlib.sha256(_spell(unsigned)).hexdigest()
    return _spell(msgspec.structs.replace(unsigned, sha256=sha256)) + b"\n"


def _stored(summary: Summary) -> _StoredSummary:
    metrics: dict[str, Any] = summary.metrics
    if not all(map(math.isfinite, metrics.values())):
        metrics = {name: float_to_json(value) for name, value in metrics.items()}
    return _StoredSummary(
        name=summary.name, step=summary.step, sequence=summary.sequence, saved_at=float(summary.saved_at),
        bytes=summary.bytes, metrics=metrics, identity=summary.identity,
    )  # fmt: skip


def _plain(summary: _StoredSummary, where: str) -> Summary:
    metrics: dict[str, Any] = summary.metrics
    if any(type(value) is dict for value in metrics.values()):
        metrics = {name: float_from_json(value, where=where) for name, value in metrics.items()}
    return Summary(
        name=summary.name, step=summary.step, sequence=summary.sequence, saved_at=summary.saved_at,
        bytes=summary.bytes, metrics=metrics, identity=summary.identity,
    )  # fmt: skip
