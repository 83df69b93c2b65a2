"""How much shared memory can still be had for slots, asked before one is made."""

from __future__ import annotations

import os
from pathlib import Path

from ckptd.snapshot.room import MARGIN_BYTES, Room, check_room, memory_rooms

__all__ = ["MARGIN_BYTES", "Room", "check_room", "rooms_for"]


def rooms_for(folder: Path) -> list[Room]:
    """Every bound that holds for slots in this folder: its file system, the machine, the cgroups."""
    found = os.statvfs(folder if folder.is_dir() else folder.parent)  # removed by somebody, it is made again
    shm = Room(
        str(folder.parent),
        found.f_bavail * found.f_frsize,
        "enlarge it (docker: --shm-size=…; mount -o remount,size=…), point CKPTD_SHM_DIR at a larger tmpfs, "
        "or use fewer slots",
    )
    return [shm, *memory_rooms()]
