"""Pages mapped before they are needed: the first copy into memory that isn't takes five to twenty times as long."""

from __future__ import annotations

import mmap
from typing import Final

from ckptd.limits import MIB, PAGE_ALIGNMENT

_POPULATE_READ: Final = 22  # MADV_POPULATE_READ and _WRITE, since Linux 5.14
_POPULATE_WRITE: Final = 23
_CHUNK: Final = 16 * MIB  # the GIL is held during each call


def prefault(mapping: mmap.mmap, memory: memoryview, *, write: bool, header_bytes: int = 0) -> None:
    """Touch every page of a mapping, and change no byte.

    Args:
        mapping: What to touch.
        memory: The same, as a view.
        write: Whether it is to be written; nobody else may be writing to it then.
        header_bytes: At the beginning, where others may be writing all the same.
    """
    for start in range(0, len(memory), _CHUNK):
        stop = min(start + _CHUNK, len(memory))
        try:
            mapping.madvise(_POPULATE_WRITE if write else _POPULATE_READ, start, stop - start)
        except OSError:  # an older kernel
            _touch(memory, start, min(stop, header_bytes), write=False)
            _touch(memory, max(start, header_bytes), stop, write=write)


def _touch(memory: memoryview, start: int, stop: int, *, write: bool) -> None:
    with memory[start:stop:PAGE_ALIGNMENT] as pages:
        seen = bytes(pages)
        if write:
            pages[:] = seen
