from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import SharedMemoryTooSmall
from ckptd.limits import MIB
from ckptd.snapshot import room
from ckptd_daemon.core.room import MARGIN_BYTES, Room, check_room, rooms_for


def test_the_tightest_bound_decides_and_names_its_fix() -> None:
    rooms = [Room("/dev/shm", 500, "--shm-size"), Room("cgroup x", 100, "raise the limit")]
    check_room(100, rooms)
    with pytest.raises(SharedMemoryTooSmall, match=r"cgroup x.*raise the limit"):
        check_room(101, rooms)
    check_room(10**18, [])


def test_shared_memory_and_the_machine_are_bounds_everywhere() -> None:
    found = {bound.where: bound for bound in rooms_for(Path("/dev/shm"))}
    assert "--shm-size" in found["/dev"].todo
    assert found["memory of this machine"].free_bytes > 0


def write_group(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_a_cgroup_and_all_above_it_bound_what_is_left_with_the_page_cache_counted_as_free(
    tmp_path: Path,
) -> None:
    write_group(tmp_path / "a", str(1000 * MIB), 900 * MIB, 100 * MIB)
    write_group(tmp_path / "a" / "b", "max", 1, 1)
    (tmp_path / "memory.max").write_text("not a number")
    names = ("memory.max", "memory.current", "inactive_file")
    (bound,) = room._up_from(tmp_path, "/a/b", *names)
    assert bound.where.endswith("/a")
    assert bound.free_bytes == 200 * MIB - MARGIN_BYTES


def test_a_cgroup_that_is_not_mounted_bounds_nothing(tmp_path: Path) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    assert list(room._up_from(tmp_path, "/not/there", *names)) == []


def test_of_a_cgroup_of_version_1_the_memory_of_trainer_and_slots_is_what_is_used(tmp_path: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (tmp_path / names[0]).write_text(str(2**63 - 4096))  # no limit
    group = tmp_path / "job"
    group.mkdir()
    trainer, slots = 300 * MIB, 100 * MIB
    (group / names[0]).write_text(str(1000 * MIB))
    (group / names[1]).write_text(str(trainer + slots))
    (group / "memory.stat").write_text("total_inactive_file 0\nshmem 7\n")
    (bound,) = room._up_from(tmp_path, "/job", *names)
    assert bound.free_bytes == 600 * MIB - MARGIN_BYTES
    check_room(slots, [bound])
    with pytest.raises(SharedMemoryTooSmall, match=r"no room for the slots.*memory limit"):
        check_room(600 * MIB, [bound])
