"""What the folder of a root's slots says of its root: a small file, `root.json`, with path, device, inode and
birth time.

The root's id leads to its slots. When the id is lost (somebody removed or damaged the root's own file), this
leads from the slots back to the root, so that what was sealed in them is still written, and the memory freed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Final

from ckptd.disk import durable, leftovers
from ckptd.disk.birth_time import place_of
from ckptd.disk.folder_files import open_folder, read_small_file
from ckptd.errors import CorruptCheckpoint
from ckptd.format.strict_json import canonical, parse
from ckptd.limits import KIB

RECORD: Final = "root.json"
_SCHEMA: Final = "ckptd.slots-v1"
_MOST_BYTES: Final = 64 * KIB
_NAME: Final = re.compile(r"ckptd-([0-9]{1,10})-([0-9a-f]{32})", re.ASCII)


def slot_folder_name(root_id: str) -> str:
    """`ckptd-<uid>-<root id>`, for the user this process runs as."""
    return f"ckptd-{os.geteuid()}-{root_id}"


def record_root(folder: Path, root: Path) -> None:
    """Have the slot folder say whose it is. The caller holds the root's lock.

    Raises:
        OSError: It can't; what it said before is untouched.
    """
    leftovers.sweep(folder)
    wanted = {"schema": _SCHEMA, "path": os.fsdecode(root), **place_of(root)}
    if _recorded(folder) != wanted:
        durable.replace_file(folder / RECORD, [canonical(wanted)], sync=False)  # memory: nothing to sync


def recorded_ids(parent: Path, root: Path) -> list[str]:
    """The ids of the slot folders in `parent` that are ours and say they are this root's, newest first.

    A root that was copied is another folder, with another inode, so it never gets the slots of the first; nor does
    one that has the inode of a root that was deleted: it was made later.

    Raises:
        OSError: They can't be looked through now, so nobody can say that there are none.
    """
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    wanted = place_of(root)
    held = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != os.geteuid() or not _is_private(parent / name):
            continue
        said = _recorded(parent / name)
        if said is not None and {name: said[name] for name in wanted} == wanted:
            held.append((os.lstat(parent / name).st_mtime_ns, match[2]))
    return [root_id for _, root_id in sorted(held, reverse=True)]


def remove_slot_folder(folder: Path) -> None:
    """Remove it, if no slot is left in it.

    Raises:
        OSError: Somebody still needs what is in it, or it is gone.
    """
    if all(name == RECORD for name in os.listdir(folder)):
        (folder / RECORD).unlink(missing_ok=True)
    folder.rmdir()


def _recorded(folder: Path) -> dict[str, Any] | None:
    """What it says; None when it says nothing that can be read."""
    where = str(folder / RECORD)
    try:
        fd = open_folder(folder)
        try:
            obj = parse(read_small_file(fd, RECORD, where, _MOST_BYTES), where=where, max_bytes=_MOST_BYTES)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError, CorruptCheckpoint):
        return None
    names = {"schema", "path", "dev", "ino", "born"}
    if not isinstance(obj, dict) or set(obj) != names or obj["schema"] != _SCHEMA:
        return None
    return obj


def _is_private(folder: Path) -> bool:
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
