"""index.json of a run: marks of what was verified, and summaries. A cache, and never more.

Missing, empty or wrong it is rebuilt from the folders, and nothing is lost, forgotten or deleted by that. A
mark counts only while name, sequence, index_sha256 and stat signature are those of the folder that is there.

It is read by every question, for runs of 10,000 checkpoints too: so each checkpoint is a short row, and typed code
reads it. Its bytes must be the one spelling of what they say, by which a key given twice, a number out of range
or any other changed byte shows.

What changes with every commit is in recent.json beside it, which is short: the rows that index.json hasn't got yet,
always those of the newest, and the names that went. It goes with one index.json and is nothing without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from ckptd.disk import durable
from ckptd.disk.entry import folder_identity
from ckptd.disk.folder_files import read_small_file
from ckptd.errors import CorruptCheckpoint
from ckptd.format.strict_json import float_from_json, float_to_json
from ckptd.limits import MAX_RUN_INDEX_BYTES
from ckptd.names import INDEX_FILE, NEWEST_FILE, RECENT_FILE

SCHEMA: Final = "ckpt.v2-run-index.2"
RECENT_SCHEMA: Final = "ckpt.v2-run-recent.2"

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Mark(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A checkpoint that was verified.

    Attributes:
        name, sequence, index_sha256: Which one.
        stat_signature: Of its folder when it was read (verification.stat_signature).
        how: How it was read: "direct", "dontneed" or "cached".
        verified_at: When it was last read in full, in Unix seconds. Only the scrub goes by it, and takes a time that can't
            be for none: then it is read again.
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


class Recent(RunIndex, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What index.json doesn't say yet.

    Attributes:
        base: The index.json it goes with (`identity_of`).
        checkpoints, marks: Of those that came or changed since, and of the newest. They take the place of what
            index.json has of them.
        gone: Names in index.json of folders that went, separated by spaces.
    """

    base: str
    gone: str = ""


class _StoredSummary(Summary, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    metrics: dict[str, float | dict[str, str]]  # type: ignore[assignment]  # JSON has no NaN: it is tagged


class _File(RunIndex, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    sha256: str
    checkpoints: tuple[_StoredSummary, ...]


class _RecentFile(Recent, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str
    sha256: str
    checkpoints: tuple[_StoredSummary, ...]


_spell = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(_File).decode
_decode_recent = msgspec.json.Decoder(_RecentFile).decode
_T = TypeVar("_T")
_AnyFile = TypeVar("_AnyFile", _File, _RecentFile)


def read_run_index(run_dir: Path) -> RunIndex | None:
    """The run's index with what is recent, or None when there is none or it can't be relied on."""
    base = identity_of(run_dir)  # before it is read: what is recent is read of this one, or not at all
    index = _read(run_dir, INDEX_FILE, run_index_from_bytes)
    recent = _read(run_dir, RECENT_FILE, _recent_from_bytes)
    return index if index is None or recent is None or recent.base != base else _with_recent(index, recent)


def read_recent(run_dir: Path) -> Recent | None:
    """What is recent, or None when there is nothing that goes with this index.json."""
    recent = _read(run_dir, RECENT_FILE, _recent_from_bytes)
    return recent if recent is not None and recent.base == identity_of(run_dir) else None


def known_folders(run_dir: Path) -> tuple[Recent, set[str]] | None:
    """What is recent, and the token_of each checkpoint that it and index.json know; None without both."""
    base = identity_of(run_dir)
    index, recent = _read(run_dir, INDEX_FILE, run_index_from_bytes), read_recent(run_dir)
    if index is None or recent is None or recent.base != base:
        return None
    changed = {*recent.gone.split(" "), *(row.name for row in recent.checkpoints)}
    rows = chain((row for row in index.checkpoints if row.name not in changed), recent.checkpoints)
    return recent, {token_of(row.name, row.identity) for row in rows if row.identity}


def write_run_index(run_dir: Path, index: RunIndex) -> None:
    """Replace index.json; nothing is recent any more. The caller holds the root's lock. Not synced: a cache
    needs no fsync.

    Raises:
        OSError: The old one is untouched.
    """
    try:
        durable.replace_file(run_dir / INDEX_FILE, [run_index_to_bytes(index)], sync=False)
    finally:  # not before: who is killed in between must not have forgotten which sequence was the last
        forget_recent(run_dir)


def write_recent(run_dir: Path, recent: Recent) -> None:
    """Replace recent.json; as for write_run_index.

    Raises:
        OSError: There is none now.
    """
    unsigned = _RecentFile(
        schema=RECENT_SCHEMA, sha256="", run=recent.run, run_id=recent.run_id,
        highest_sequence=recent.highest_sequence, marks=recent.marks, base=recent.base, gone=recent.gone,
        checkpoints=tuple(map(_stored, recent.checkpoints)),
    )  # fmt: skip
    try:
        durable.replace_file(run_dir / RECENT_FILE, [_signed(unsigned)], sync=False)
    except OSError:
        forget_recent(run_dir)
        raise


def forget_recent(run_dir: Path) -> None:
    """Have questions look at the folders: what recent.json and newest.json say of them may be wrong soon."""
    for name in (NEWEST_FILE, RECENT_FILE):
        with contextlib.suppress(OSError):
            (run_dir / name).unlink(missing_ok=True)


def fold_recent(run_dir: Path) -> None:
    """The same, but have index.json say it, if it can be written: of a newest checkpoint that was deleted, or whose
    index is damaged, nothing else knows the sequence, which must not be given again."""
    if read_recent(run_dir) is not None and (index := read_run_index(run_dir)) is not None:
        with contextlib.suppress(OSError):
            write_run_index(run_dir, index)
    forget_recent(run_dir)


def identity_of(run_dir: Path) -> str:
    """Tells one index.json from another; "" when there is none."""
    try:
        return folder_identity(os.lstat(run_dir / INDEX_FILE))
    except OSError:
        return ""


def token_of(name: str, identity: str) -> str:
    """Of a checkpoint's folder with that identity (entry.folder_identity)."""
    return f"{name}:{identity}"


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
    file = _checked(_decode, data, SCHEMA, where)
    return RunIndex(
        run=file.run, run_id=file.run_id, highest_sequence=file.highest_sequence, marks=file.marks,
        checkpoints=_plain(file.checkpoints, where),
    )  # fmt: skip


def _recent_from_bytes(data: bytes, where: str) -> Recent:
    file = _checked(_decode_recent, data, RECENT_SCHEMA, where)
    return Recent(
        run=file.run, run_id=file.run_id, highest_sequence=file.highest_sequence, marks=file.marks,
        base=file.base, gone=file.gone, checkpoints=_plain(file.checkpoints, where),
    )  # fmt: skip


def _with_recent(index: RunIndex, recent: Recent) -> RunIndex:
    names = {summary.name for summary in recent.checkpoints}
    return RunIndex(
        run=recent.run, run_id=recent.run_id, highest_sequence=recent.highest_sequence,
        marks=(*(mark for mark in index.marks if mark.name not in names), *recent.marks),
        checkpoints=(*(one for one in index.checkpoints if one.name not in names), *recent.checkpoints),
    )  # fmt: skip


def _read(run_dir: Path, name: str, check: Callable[[bytes, str], _T]) -> _T | None:
    where = str(run_dir / name)
    try:
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            data = read_small_file(folder, name, where, MAX_RUN_INDEX_BYTES)
        finally:
            os.close(folder)
        return check(data, where)
    except (OSError, CorruptCheckpoint):
        return None  # a cache: to have none costs a rebuild, to trust a bad one costs checkpoints


def _checked(decode: Callable[[bytes], _AnyFile], data: bytes, schema: str, where: str) -> _AnyFile:
    try:
        file = decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint("not a run's index", where=where, seen=str(error)[:200]) from error
    if file.schema != schema:
        raise CorruptCheckpoint("unknown schema", where=where, seen=file.schema[:80], wanted=schema)
    if _signed(msgspec.structs.replace(file, sha256="")) != data:
        raise CorruptCheckpoint("the run's index was changed", where=where)
    return file


def _signed(unsigned: _AnyFile) -> bytes:
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


def _plain(stored: Iterable[_StoredSummary], where: str) -> tuple[Summary, ...]:
    plain = []
    for summary in stored:
        metrics: dict[str, Any] = summary.metrics
        if any(type(value) is dict for value in metrics.values()):
            metrics = {name: float_from_json(value, where=where) for name, value in metrics.items()}
        plain.append(
            Summary(
                name=summary.name, step=summary.step, sequence=summary.sequence, saved_at=summary.saved_at,
                bytes=summary.bytes, metrics=metrics, identity=summary.identity,
            )
        )  # fmt: skip
    return tuple(plain)
