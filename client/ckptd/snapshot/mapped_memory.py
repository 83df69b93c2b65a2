"""Mapped memory that others may have made arrangements for, which end before it is unmapped."""

from __future__ import annotations

import mmap
from collections.abc import Callable

__all__ = ["MappedMemory"]


class MappedMemory(mmap.mmap):
    """A map with one thing to do first, when it is closed.

    Attributes:
        before_unmap: Called once, at close(); None for nothing.
    """

    before_unmap: Callable[[], object] | None = None

    def close(self) -> None:
        """Unmap it. BufferError while views of it live; it goes with the last of them then."""
        before, self.before_unmap = self.before_unmap, None
        if before is not None:
            before()
        super().close()
