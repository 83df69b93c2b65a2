"""Slots in huge pages: asked for in a way that changes neither size nor content, and never needed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import SharedMemoryTooSmall
from ckptd.snapshot import huge_pages
from ckptd.snapshot.huge_pages import HUGE_PAGE_BYTES
from ckptd.snapshot.slots import Slot, SlotState

SIZE = 3 * HUGE_PAGE_BYTES + 5 * 4096


class Libc:
    """The real one; notes what it was asked, and fails where it is told to."""

    def __init__(self, *, deaf: bool = False) -> None:
        self._real, self._deaf = huge_pages._libc(), deaf
        self.collapsed: list[tuple[int, int, int]] = []
        self.answers: list[int] = []
        self.shown: list[str] = []

    def mmap(self, *arguments: Any) -> Any:
        return ctypes.c_void_p(-1).value if self._deaf else self._real.mmap(*arguments)

    def munmap(self, *arguments: Any) -> Any:
        return self._real.munmap(*arguments)

    def madvise(self, start: int, length: int, advice: int) -> Any:
        self.collapsed.append((start, length, advice))
        self.answers.append(self._real.madvise(start, length, advice))
        self.shown.append(mapping_at(start))
        return self.answers[-1]


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
    libc = Libc()
    monkeypatch.setattr(huge_pages, "_libc", lambda: libc)
    slot = Slot.create(folder / "slot", SIZE)
    ((start, length, advice),) = libc.collapsed
    assert (start % HUGE_PAGE_BYTES, length, advice) == (0, 3 * HUGE_PAGE_BYTES, 25)
    if libc.answers == [0]:
        assert f"ShmemPmdMapped: {length // 1024:8} kB" in libc.shown[0]
    found = slot.path.stat()
    assert (found.st_size, slot.header().state) == (SIZE, SlotState.FREE)
    assert found.st_blocks * 512 >= SIZE
    assert not any(slot.data[:])
    slot.close()


def test_a_slot_without_huge_pages_is_as_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Libc(deaf=True)
    monkeypatch.setattr(huge_pages, "_libc", lambda: libc)
    slot = Slot.create(folder / "slot", SIZE)
    assert libc.collapsed == []
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
