# ruff: noqa: TID253
"""Format v1, read for ever: one file, or shards with a meta.pt and an index. Nothing writes it any more.

v1 has hashes only of shards and meta.pt, and not in every file. What has none is loaded and said in the log
as unhashed: nothing can tell whether those bytes are still what was saved. `ckptd.tensors.migrate` makes a v2 of it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ckptd.disk.folder_files import open_file, open_folder, read_small_file
from ckptd.errors import CheckpointGone, CorruptCheckpoint, NothingThere, UnknownSchema
from ckptd.format.archive_check import check_archive
from ckptd.format.strict_json import parse
from ckptd.limits import MAX_INDEX_BYTES, MAX_SHARDS
from ckptd.names import INDEX_FILE, META_FILE, SINGLE_FILE
from ckptd.tensors.loaded_tree import check_tree

log = logging.getLogger(__name__)

SINGLE: Final = "ckpt.v1"
SHARDED: Final = "ckpt.v1-sharded"
SHARD: Final = "ckpt-shard.v1"
INDEX: Final = "ckpt.v1-index"

_REQUIRED: Final = ("optimizer", "scheduler", "state", "rng")
_SHARD_FILE: Final = re.compile(r"model\.shard-[0-9]{3,6}\.pt", re.ASCII)
_REFUSED_GLOBAL: Final = re.compile(r"(?:GLOBAL|Unsupported \w+) ([\w.]+)", re.ASCII)
_SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)

# Some files hold NumPy's key row as it came from get_state(): a uint32 array. Its pickle needs these names,
# and no others do; the function that makes an empty array has been in two modules.
_MAKE_ARRAY: Final[Any] = np.empty(0).__reduce__()[0]
_KEY_ROW_GLOBALS: Final[list[Any]] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (_MAKE_ARRAY, "numpy.core.multiarray._reconstruct"),
    (_MAKE_ARRAY, "numpy._core.multiarray._reconstruct"),
]


@dataclass(frozen=True, kw_only=True)
class V1Checkpoint:
    """What a checkpoint of format v1 holds.

    Attributes:
        components: See load_v1.
        step: Finished optimizer steps.
        saved_at: Unix seconds.
        shards: How many shards it has; None for the one-file kind.
        unhashed: Files that no hash vouches for.
    """

    components: dict[str, Any]
    step: int
    saved_at: float
    shards: int | None
    unhashed: tuple[str, ...]


def load_v1(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of format v1, of either kind.

    Args:
        path: Its ckpt.pt, or the folder that holds its ckpt.pt, or its index.json, meta.pt and shards.
        map_location: As for torch.load.

    Returns:
        The components `model` (a state_dict), `optimizer` and `scheduler` (as torch gave them: parameters by
        number), `state` ({step, epoch, batch_in_epoch, losses}, what TrainState takes), `rng` (lists, what
        restore_rng_state takes) and, if the file has any, `extras`.

    Raises:
        NothingThere: No checkpoint at path.
        UnknownSchema: Not format v1.
        CorruptCheckpoint: A hash, a file or a key that isn't what the checkpoint says.
    """
    return read_v1(path, map_location).components


def read_v1(path: str | os.PathLike[str], map_location: Any = "cpu") -> V1Checkpoint:
    """As load_v1, with the facts about the checkpoint."""
    path = Path(path)
    if path.is_dir() and os.path.lexists(path / INDEX_FILE):
        found = _read_sharded(path, map_location)
    else:
        found = _read_single(path / SINGLE_FILE if path.is_dir() else path, map_location)
    if found.unhashed:
        log.warning("v1.unhashed path=%s files=%s", path, ",".join(found.unhashed))
    return found


def _read_single(path: Path, map_location: Any) -> V1Checkpoint:
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CorruptCheckpoint("not a regular file", where=str(path))
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NothingThere(
            "no checkpoint of format v1", where=str(path), wanted=f"{SINGLE_FILE}, or {INDEX_FILE} beside it"
        ) from error
    payload = _payload(data, str(path), SINGLE, map_location)
    model = payload.get("model")
    if not isinstance(model, Mapping):
        raise CorruptCheckpoint("no model in it", where=str(path), seen=type(model).__name__, wanted="a dict")
    return _checkpoint(payload, model, str(path), shards=None, unhashed=(path.name,))


def _read_sharded(path: Path, map_location: Any) -> V1Checkpoint:
    folder = open_folder(path)
    try:
        index = _read_index(folder, path)
        unhashed = [name for name, sha256 in index.hashes.items() if sha256 is None]
        where = str(path / META_FILE)
        meta = _payload(_read(folder, path, META_FILE, index.hashes[META_FILE]), where, SHARDED, map_location)
        model = dict(meta.get("model") or {})
        for name in index.shards:
            _merge(
                model,
                _shard(_read(folder, path, name, index.hashes[name]), str(path / name), map_location),
                name,
            )
    finally:
        os.close(folder)
    found = _checkpoint(meta, model, where, shards=len(index.shards), unhashed=tuple(unhashed))
    if index.step is not None and index.step != found.step:
        raise CorruptCheckpoint(
            "meta.pt is of another step than the index",
            where=where,
            seen=str(found.step),
            wanted=str(index.step),
        )
    return found


def _checkpoint(
    payload: Mapping[str, Any],
    model: Mapping[str, Any],
    where: str,
    *,
    shards: int | None,
    unhashed: tuple[str, ...],
) -> V1Checkpoint:
    missing = [name for name in _REQUIRED if name not in payload]
    if missing:
        raise CorruptCheckpoint(
            "keys are missing", where=where, seen=str(sorted(payload)), wanted=", ".join(missing)
        )
    counters, saved_at = payload["state"], payload.get("wall_saved_at", 0.0)
    step = counters.get("step") if isinstance(counters, Mapping) else None
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CorruptCheckpoint("no step in it", where=where, seen=repr(step), wanted="an int of 0 or more")
    if not isinstance(saved_at, (int, float)) or not math.isfinite(saved_at):
        raise CorruptCheckpoint(
            "no time of saving in it", where=where, seen=repr(saved_at), wanted="Unix seconds"
        )
    components = {"model": model, **{name: payload[name] for name in _REQUIRED}}
    components["rng"] = _without_arrays(payload["rng"])
    if payload.get("extras") is not None:
        components["extras"] = payload["extras"]
    return V1Checkpoint(
        components=components, step=step, saved_at=float(saved_at), shards=shards, unhashed=unhashed
    )


@dataclass(frozen=True)
class _Index:
    shards: tuple[str, ...]
    hashes: dict[str, str | None]  # of meta.pt and each shard
    step: int | None


def _read_index(folder: int, path: Path) -> _Index:
    where = str(path / INDEX_FILE)
    index = parse(
        read_small_file(folder, INDEX_FILE, where, MAX_INDEX_BYTES), where=where, max_bytes=MAX_INDEX_BYTES
    )
    schema = index.get("schema") if isinstance(index, dict) else None
    if schema != INDEX:
        raise UnknownSchema("unknown schema", where=where, seen=repr(schema)[:80], wanted=INDEX)
    rows = index.get("shards")
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_SHARDS or index.get("num_shards") != len(rows):
        raise CorruptCheckpoint(
            "not a list of shards",
            where=where,
            seen=f"num_shards {index.get('num_shards')!r}",
            wanted="one row each",
        )
    hashes = {META_FILE: _sha256(index.get("meta_sha256"), where)}
    for row in rows:
        name = row.get("path") if isinstance(row, dict) else None
        if not isinstance(name, str) or not _SHARD_FILE.fullmatch(name) or name in hashes:
            raise CorruptCheckpoint(
                "not a shard", where=where, seen=repr(name)[:80], wanted="model.shard-NNN.pt, once"
            )
        hashes[name] = _sha256(row.get("sha256"), where)
    return _Index(tuple(hashes)[1:], hashes, index.get("step"))


def _sha256(value: object, where: str) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise CorruptCheckpoint("not a SHA-256", where=where, seen=repr(value)[:80], wanted="64 hex digits")
    return value


def _read(folder: int, path: Path, name: str, sha256: str | None) -> bytes:
    where = str(path / name)
    try:
        with open(open_file(folder, name, where), "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        if not path.exists():
            raise CheckpointGone("deleted while it was read", where=str(path)) from error
        raise CorruptCheckpoint("a file is missing", where=where) from error
    seen = hashlib.sha256(data).hexdigest()
    if sha256 is not None and seen != sha256:
        raise CorruptCheckpoint(
            "its sha256 is not the one in index.json", where=where, seen=seen, wanted=sha256
        )
    return data


def _payload(data: bytes, where: str, schema: str, map_location: Any) -> dict[str, Any]:
    check_archive(data, where, ours=False)
    try:
        with torch.serialization.safe_globals(_KEY_ROW_GLOBALS):
            payload = torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch raises its own, zipfile's, pickle's and struct's errors
        raise _unreadable(error, where) from error
    seen = payload.get("schema") if isinstance(payload, dict) else None
    if not isinstance(payload, dict) or seen != schema:
        raise UnknownSchema("unknown schema", where=where, seen=repr(seen)[:80], wanted=schema)
    check_tree(payload, where)
    return payload


def _unreadable(error: Exception, where: str) -> CorruptCheckpoint:
    """In our words: torch's own text advises to load without weights_only, which would run what the file holds."""
    if refused := _REFUSED_GLOBAL.search(str(error)):
        return CorruptCheckpoint(
            "holds what only code could rebuild, and none is run", where=where, seen=refused[1][:200],
            todo="save it again without that object, where it was made",
        )  # fmt: skip
    text = str(error).strip().splitlines()
    seen = text[0][:200] if text and "only load failed" not in text[0] else type(error).__name__
    return CorruptCheckpoint(
        "can't be read as a torch file", where=where, seen=seen, todo="take another copy of it"
    )


def _shard(data: bytes, where: str, map_location: Any) -> Mapping[str, Any]:
    payload = _payload(data, where, SHARD, map_location)
    tensors, keys = payload.get("tensors"), payload.get("keys")
    if (
        not isinstance(tensors, Mapping)
        or not isinstance(keys, (list, tuple))
        or sorted(tensors) != sorted(keys)
    ):
        raise CorruptCheckpoint("its tensors are not those it lists", where=where)
    return tensors


def _merge(model: dict[str, Any], tensors: Mapping[str, Any], name: str) -> None:
    twice = sorted(set(model) & set(tensors))
    if twice:
        raise CorruptCheckpoint("a tensor is in two files", where=name, seen=twice[0])
    model.update(tensors)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_arrays(item) for item in value)
    return value
