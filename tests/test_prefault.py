"""Memory is mapped before the first copy needs it, on every kernel."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptd.snapshot.prefault import prefault

PAGES = 300


class OldKernel:
    """A mapping on a kernel that can't be asked to map pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.fixture
def region(tmp_path: Path) -> Iterator[mmap.mmap]:
    """A private map of a file, in which a page counts as our own once it was written to."""
    (tmp_path / "file").write_bytes(bytes(PAGES * 4096))
    with (
        (tmp_path / "file").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
    ):
        yield mapped


@pytest.mark.parametrize("write", [False, True])
def test_without_a_kernel_that_maps_pages_each_is_touched_and_no_byte_changed(
    region: mmap.mmap, write: bool
) -> None:
    with memoryview(region) as memory:
        memory[5 * 4096] = 7
        prefault(OldKernel(), memory, write=write, header_bytes=4096)  # type: ignore[arg-type]
        assert pages(region, "Rss:") == PAGES
        assert memory[5 * 4096] == 7 and bytes(memory).count(b"\0") == PAGES * 4096 - 1
        assert pages(region, "Anonymous:") == (PAGES - 1 if write else 1)  # the header's page is only read


def test_all_pages_are_mapped_and_no_byte_changed(region: mmap.mmap) -> None:
    with memoryview(region) as memory:
        memory[3 * 4096] = 7
        prefault(region, memory, write=True)
        assert memory[3 * 4096] == 7 and bytes(memory).count(b"\0") == PAGES * 4096 - 1
        assert pages(region, "Anonymous:") == PAGES


def pages(region: mmap.mmap, field: str) -> int:
    """How many of a mapping's pages the kernel counts as that."""
    address = np.frombuffer(region, np.uint8).ctypes.data
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:08x}-"))
    return int(next(line for line in lines if line.startswith(field)).split()[1]) // 4
