"""Checking a sharded checkpoint of format v1 as far as its hashes go; it never comes out valid.

v1 states hashes of shards and of meta.pt, perhaps not of all, and none of its index. Only `ckptd migrate`
makes of it what can be proved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ckptd.disk.folder_files import open_file, read_small_file
from ckptd.disk.medium import hash_file
from ckptd.errors import CorruptCheckpoint
from ckptd.format.strict_json import parse
from ckptd.limits import MAX_INDEX_BYTES, MAX_SHARDS
from ckptd.names import INDEX_FILE, META_FILE

_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.pt", re.ASCII)


def faults_v1(folder: int, path: Path, *, uncached: bool) -> list[CorruptCheckpoint]:
    """Every fault of the open folder, missing hashes ("unhashed") among them; never empty.

    Raises:
        OSError: A file can't be opened or read.
    """
    where = str(path / INDEX_FILE)
    faults = [
        CorruptCheckpoint(
            "unhashed: format v1 has no hash of its index",
            where=where,
            todo="make a v2 of it: see ckptd migrate",
        )
    ]
    try:
        obj = parse(
            read_small_file(folder, INDEX_FILE, where, MAX_INDEX_BYTES),
            where=where,
            max_bytes=MAX_INDEX_BYTES,
        )
        stated = list(_stated(obj, where))
    except CorruptCheckpoint as error:
        return [*faults, error]
    for name, sha256 in stated:
        if (fault := _fault(folder, path / name, sha256, uncached)) is not None:
            faults.append(fault)
    return faults


def _stated(obj: Any, where: str) -> Iterator[tuple[str, Any]]:
    """(file name, stated hash or what is in its place) of every file."""
    shards = obj.get("shards") if isinstance(obj, dict) else None
    if not isinstance(shards, list) or len(shards) > MAX_SHARDS:
        raise CorruptCheckpoint("no list of shards", where=where)
    yield META_FILE, obj.get("meta_sha256")
    for shard in shards:
        name = shard.get("path") if isinstance(shard, dict) else None
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise CorruptCheckpoint("not a shard's file name", where=where, seen=repr(name)[:80])
        yield name, shard.get("sha256")


def _fault(folder: int, file: Path, sha256: Any, uncached: bool) -> CorruptCheckpoint | None:
    where = str(file)
    if sha256 is None:
        return CorruptCheckpoint("unhashed", where=where)
    try:
        fd = open_file(folder, file.name, where)
    except CorruptCheckpoint as error:
        return error
    except FileNotFoundError:
        return CorruptCheckpoint("is missing", where=where)
    try:
        seen = hash_file(fd, uncached=uncached)[0]
    finally:
        os.close(fd)
    return (
        None
        if seen == sha256
        else CorruptCheckpoint("wrong sha256", where=where, seen=seen, wanted=str(sha256))
    )
