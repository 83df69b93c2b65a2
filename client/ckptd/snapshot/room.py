"""How much memory can still be had: of the machine and of the cgroups, each bound with its fix.

Asked before memory of a state's size is taken. Taking more than a cgroup allows doesn't fail, it gets a process
killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.errors import SharedMemoryTooSmall
from ckptd.limits import MIB

#: Left over of the machine's and the cgroup's memory for everything else.
MARGIN_BYTES: Final = 32 * MIB

_UNLIMITED: Final = 2**60  # cgroup v1 says "no limit" with a number near 2**63
_CGROUPS: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Room:
    """One bound on memory: whose it is, how many bytes are left in it, how to get more."""

    where: str
    free_bytes: int
    todo: str


def check_room(wanted_bytes: int, rooms: Iterable[Room], what: str = "the slots") -> None:
    """Raise SharedMemoryTooSmall, naming the tightest bound, when one has no room for these bytes of `what`."""
    tightest = min(rooms, key=lambda room: room.free_bytes, default=None)
    if tightest is not None and tightest.free_bytes < wanted_bytes:
        raise SharedMemoryTooSmall(
            f"no room for {what}", where=tightest.where,
            seen=f"{max(0, tightest.free_bytes) / MIB:.1f} MiB free", wanted=f"{wanted_bytes / MIB:.1f} MiB",
            todo=tightest.todo,
        )  # fmt: skip


def memory_rooms() -> list[Room]:
    """Every bound on memory that holds for this process, shared or not."""
    return [*_machine(), *_cgroups()]


def _machine() -> Iterator[Room]:
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        available = free["MemAvailable"] + free.get("SwapFree", 0) - MARGIN_BYTES
        yield Room("memory of this machine", available, "free memory, or use fewer slots")
    except (OSError, ValueError, KeyError, IndexError):
        return


def _cgroups() -> Iterator[Room]:
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _up_from(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = _CGROUPS / "memory"
            yield from _up_from(
                top, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _up_from(top: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[Room]:
    """The bounds of a cgroup and all above it; in a container its own is often seen at the top."""
    folder = top / path.lstrip("/")
    for group in (folder, *folder.parents):
        if group.is_relative_to(top) and (free := _free_in(group, limit, usage, cache)) is not None:
            yield Room(
                f"cgroup {group}", free, "raise the container's memory limit: slots count as its memory"
            )


def _free_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Bytes left in a cgroup, its droppable page cache included, less the margin; None without a limit."""
    try:
        most = int((group / limit).read_text("ascii"))
        if most >= _UNLIMITED:
            return None
        used = int((group / usage).read_text("ascii"))
        fields = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return most - used + int(fields.get(cache, 0)) - MARGIN_BYTES
    except (OSError, ValueError):  # "max", or no such file: no limit here
        return None
