# ruff: noqa: TID253
"""`load`: a checkpoint's components, from bytes that were all checked against their hashes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.entry import reading
from ckptd.disk.folder_files import close_all, open_folder, read_small_file
from ckptd.disk.next_valid import with_advice
from ckptd.disk.reader import Reader
from ckptd.disk.wrong_path import refuse_wrong_path
from ckptd.errors import CorruptCheckpoint, InvalidArgument
from ckptd.format.records import SCHEMA_V1
from ckptd.limits import MAX_INDEX_BYTES
from ckptd.names import INDEX_FILE, SINGLE_FILE, TABLE_FILE
from ckptd.tensors.moving import moved
from ckptd.tensors.reading import Loaded as Loaded
from ckptd.tensors.reading import load_from, load_mapped, select
from ckptd.tensors.registered_tags import refuse_changed


def load(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    only: Collection[str] | None = None,
    mmap: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint of any format version, every byte checked against its hash (v1 has not all of them).

    With `mmap=True` the tensors of large checkpoints lie in their files and are read where they are first looked at, so
    that loading takes no time and no memory. **Their bytes are not checked then**: only index.json, tensors.json and
    meta.pt are, and the sizes of all files; `ckptd.verify(path)` checks the rest. Tensors may be written to: that stays
    in this process. The files may be deleted meanwhile; an I/O error in one ends the process (SIGBUS). Checkpoints in
    one file (ckpt.pt: below 64 MiB, unless told otherwise) and of format v1 are read and checked as without it.

    Args:
        path: The checkpoint's folder; for format v1 also its ckpt.pt.
        map_location: Device for the tensors. RNG states stay on the CPU.
        only: Names of the components to load; the files of others aren't read. None means all.
        mmap: Whether to leave large tensors in their files, unchecked.

    Returns:
        {"model": state_dict, "optimizer": …, "rng": …}: what was saved, with plain values for objects.
        Generators come back as generators. Tied tensors share their memory, also those of different components and
        files; what `only` leaves out isn't read, and what was tied to it has a memory of its own. An instance of a
        registered class (`ckptd.register_type`) that this process hasn't registered is a
        `ckptd.tensors.registered_tags.Unbuilt`.

    Raises:
        CheckpointGone: It isn't there, or was deleted before it was opened.
        CorruptCheckpoint: Bytes are not those committed; where, seen and wanted say which.
        UnknownSchema: It is of a version this one can't read.
        StateMismatch: A class registered here has other fields, members or values than when it was saved.
        InvalidArgument: `only` names a component it doesn't have, map_location isn't a device that this torch
            can use, or path is a file of a checkpoint, a run's folder or a root.
        NothingThere: path is a folder with nothing of a checkpoint in it.
    """
    try:
        with _opened(path, only, _device(map_location), absent_ok=False, mapped=mmap) as loaded:
            components = loaded.components
    except CorruptCheckpoint as error:
        raise with_advice(error, path)  # noqa: B904  # it is that error, not another one
    refuse_changed(components, os.fspath(path))
    return components


def load_with_index(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    only: Collection[str] | None = None,
    absent_ok: bool = False,
) -> Loaded:
    """As `load`, with the index that proves the bytes; with absent_ok `only` may name what it doesn't have."""
    with _opened(path, only, _device(map_location), absent_ok=absent_ok) as loaded:
        return loaded


def opened(
    path: str | os.PathLike[str], *, only: Collection[str] | None = None, lazily: bool = False
) -> AbstractContextManager[Loaded]:
    """As `load_with_index`, absent_ok; loaded lazily it is whole once its `unread` was read, within the context."""
    return _opened(path, only, torch.device("cpu"), absent_ok=True, lazily=lazily)


@contextmanager
def _opened(
    path: str | os.PathLike[str], only: Collection[str] | None, device: torch.device,
    *, absent_ok: bool, lazily: bool = False, mapped: bool = False,
) -> Iterator[Loaded]:  # fmt: skip
    if isinstance(only, str):
        raise InvalidArgument("not a list of components", where="only", seen=repr(only), wanted=f"[{only!r}]")
    with reading(os.fspath(path)):
        refuse_wrong_path(path)
        is_v1 = _is_v1(Path(path))
    if is_v1:
        yield _load_v1(path, device, only, absent_ok)
        return
    with CheckpointReader(os.fspath(path), only=only) as reader:
        if mapped and reader.index.layout == "sharded":
            yield load_mapped(reader, device, only)
        else:
            reader.begin()
            yield load_from(reader, device, only, absent_ok=absent_ok, lazily=lazily)


def load_reader(reader: Reader, only: Collection[str] | None = None, *, lazily: bool = False) -> Loaded:
    """The components of a checkpoint of format v2 whose bytes somebody else has, in the CPU's memory; see `load_from`."""
    return load_from(reader, torch.device("cpu"), only, absent_ok=True, lazily=lazily)


def _device(map_location: str | torch.device) -> torch.device:
    seen = repr(map_location)[:80]
    try:
        device = torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(
            "not a device", where="map_location", seen=seen, wanted='"cpu", "cuda:0", …'
        ) from error
    try:
        torch.empty(0, device=device)  # found out now, not after the whole checkpoint was read
    except (RuntimeError, AssertionError, ImportError) as error:  # torch asserts that it was built with CUDA
        raise InvalidArgument(
            "this torch can't use the device", where="map_location",
            seen=f"{seen}: {str(error).partition(chr(10))[0]}"[:200], todo='use map_location="cpu"',
        ) from error  # fmt: skip
    return device


# --- format v1 ------------------------------------------------------------------------------------


def _is_v1(path: Path) -> bool:
    """Whether path looks like format v1: a file, or a folder whose index says so, or that has only a ckpt.pt.

    Only the look: `ckptd.tensors.v1` reads the schema strings and refuses what isn't v1.
    """
    if path.is_file():
        return True
    if os.path.lexists(path / TABLE_FILE):
        return False
    try:
        folder = open_folder(os.path.realpath(path))
    except OSError:
        return False
    try:
        index = read_small_file(folder, INDEX_FILE, str(path), MAX_INDEX_BYTES)
        return f'"{SCHEMA_V1}"'.encode() in index
    except FileNotFoundError:
        return (path / SINGLE_FILE).is_file()
    except (OSError, CorruptCheckpoint):
        return False
    finally:
        close_all([folder])


def _load_v1(
    path: str | os.PathLike[str], device: torch.device, only: Collection[str] | None, absent_ok: bool
) -> Loaded:
    from ckptd.tensors.v1 import read_v1

    found = read_v1(path)
    chosen = moved(select(found.components, only, absent_ok), device)
    return Loaded(None, found.step, chosen, tuple(found.components))
