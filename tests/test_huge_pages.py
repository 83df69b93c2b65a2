"""Slots in huge pages: asked for in a way that changes neither size nor content, and never needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import SharedMemoryTooSmall
from ckptd.snapshot import huge_pages
from ckptd.snapshot.huge_pages import HUGE_PAGE_BYTES
from ckptd.snapshot.slots import Slot, SlotState

SIZE = 3 * HUGE_PAGE_BYTES + 5 * 4096


class Asked:
    """What the kernel was asked to collapse, what it answered, and what it showed then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collapsed: list[tuple[int, int, int]] = []
        self.taken: list[bool] = []
        self.shown: list[str] = []
        self._real = huge_pages.advise
        monkeypatch.setattr(huge_pages, "advise", self._advise)

    def _advise(self, start: int, length: int, advice: int) -> bool:
        self.collapsed.append((start, length, advice))
        self.taken.append(self._real(start, length, advice))
        self.shown.append(mapping_at(start))
        return self.taken[-1]


def mapping_at(start: int) -> str:
    """What /proc/self/smaps says of the mapping that begins there."""
    parts = Path("/proc/self/smaps").read_text().split(f"\n{start:x}-")
    return parts[1].split("VmFlags")[0] if len(parts) > 1 else ""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/ckptd-test-huge-{os.getpid()}")
    path.mkdir()
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


def test_a_slot_asks_for_all_its_whole_huge_pages_and_gets_them_where_the_kernel_has_any(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    slot = Slot.create(folder / "slot", SIZE)
    ((start, length, advice),) = asked.collapsed
    assert (start % HUGE_PAGE_BYTES, length, advice) == (0, 3 * HUGE_PAGE_BYTES, 25)
    if asked.taken == [True]:
        assert f"ShmemPmdMapped: {length // 1024:8} kB" in asked.shown[0]
    found = slot.path.stat()
    assert (found.st_size, slot.header().state) == (SIZE, SlotState.FREE)
    assert found.st_blocks * 512 >= SIZE
    assert not any(slot.data[:])
    slot.close()


def test_a_slot_without_huge_pages_is_as_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    monkeypatch.setattr(huge_pages, "map_at", lambda *_: None)
    slot = Slot.create(folder / "slot", SIZE)
    assert asked.collapsed == []
    assert slot.path.stat().st_blocks * 512 >= SIZE
    slot.close()


def test_nothing_stays_mapped(folder: Path) -> None:
    Slot.create(folder / "slot", SIZE).close()
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_a_folder_without_room_is_said_before_anything_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huge_pages.os, "pwrite", full)
    with pytest.raises(SharedMemoryTooSmall, match="no room for a slot"):
        Slot.create(folder / "slot", SIZE)
    assert list(folder.iterdir()) == []
