"""Memory is mapped before the first copy needs it, on every kernel."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from ckptd.snapshot.prefault import prefault


class OldKernel:
    """A mapping on a kernel that can't be asked to map pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("write", [False, True])
def test_without_a_kernel_that_maps_pages_each_is_touched_and_no_byte_changed(write: bool) -> None:
    size = 300 * 4096
    with mmap.mmap(-1, size) as region, memoryview(region) as memory:
        memory[5 * 4096] = 7
        memory[1] = 8
        before = resident(region)
        prefault(OldKernel(), memory, write=write, header_bytes=4096)  # type: ignore[arg-type]
        assert bytes(memory[: 6 * 4096]).count(b"\0") == 6 * 4096 - 2
        assert (memory[5 * 4096], memory[1]) == (7, 8)
        if write:  # of memory nobody ever wrote, reading maps one page of zeros for all
            assert before < 10 and resident(region) >= 299


def resident(region: mmap.mmap) -> int:
    """Pages of a mapping that are in memory."""
    address = np.frombuffer(region, np.uint8).ctypes.data
    for entry in Path("/proc/self/smaps").read_text().split("VmFlags"):
        line = next((each for each in entry.splitlines() if each.startswith(f"{address:x}-")), None)
        if line is not None:
            return int(entry.split("Rss:")[1].split()[0]) // 4
    raise AssertionError("not mapped")


def test_all_pages_are_mapped_and_no_byte_changed() -> None:
    with mmap.mmap(-1, 5000 * 4096) as region, memoryview(region) as memory:
        memory[3 * 4096] = 7
        prefault(region, memory, write=True)
        assert memory[3 * 4096] == 7 and resident(region) == 5000
