"""The root's id: 32 hex digits in .ckptd/root.json, bound to the root folder's device, inode and birth time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ckptd.disk import durable
from ckptd.disk.birth_time import place_of
from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.disk.slot_folder import recorded_ids
from ckptd.errors import CorruptCheckpoint
from ckptd.format.strict_json import canonical, parse
from ckptd.limits import KIB

_FILE: Final = "root.json"
_SCHEMA: Final = "ckptd.root-v1"
_MOST_BYTES: Final = 64 * KIB


def read_id(root: Path, service: Path) -> str | None:
    """The stored id; None when there is none, or it belongs to another folder (this one is a copy)."""
    where = str(service / _FILE)
    try:
        folder = open_folder(service)
        try:
            obj = parse(
                read_small_file(folder, _FILE, where, _MOST_BYTES), where=where, max_bytes=_MOST_BYTES
            )
        finally:
            os.close(folder)
    except (OSError, CorruptCheckpoint):
        return None
    place = place_of(root)
    if not isinstance(obj, dict) or set(obj) != {"schema", "id", *place} or obj["schema"] != _SCHEMA:
        return None
    root_id = obj["id"]
    if not isinstance(root_id, str) or len(root_id) != 32 or set(root_id) - set("0123456789abcdef"):
        return None
    return root_id if {name: obj[name] for name in place} == place else None


def read_or_make_id(root: Path, service: Path, shm_parent: Path) -> str:
    """The stored id, or the one that slots of this very root were made under, or a new one, which is stored.

    Raises:
        OSError: It can't be stored, or what lies in shm_parent can't be read.
    """
    if root_id := read_id(root, service):
        return root_id
    with _locked(service):  # a client and its daemon may open a fresh root at the same moment
        if root_id := read_id(root, service):
            return root_id
        root_id = _lost_id(root, service, shm_parent) or secrets.token_hex(16)
        _write(root, service, root_id)
        return root_id


def _lost_id(root: Path, service: Path, shm_parent: Path) -> str | None:
    """The id this root had. A fresh folder had none: it may have the inode of one that was deleted."""
    used = any(name != service.name for name in os.listdir(root)) or os.listdir(service)
    return next(iter(recorded_ids(shm_parent, root)), None) if used else None


def restore_id(root: Path, service: Path, root_id: str) -> bool:
    """Store root_id again if it isn't what is stored; whether that was needed. The caller holds the root's lock.

    Raises:
        OSError: It can't be stored.
    """
    if read_id(root, service) == root_id:
        return False
    with _locked(service):
        _write(root, service, root_id)
    return True


def _write(root: Path, service: Path, root_id: str) -> None:
    record = {"schema": _SCHEMA, "id": root_id, **place_of(root)}
    # Not synced: a power cut takes the slots as well, and without slots one id is as good as another.
    durable.replace_file(service / _FILE, [canonical(record)], sync=False)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = open_folder(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
