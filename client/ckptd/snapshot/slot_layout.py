"""Where things lie in a slot, and how large it must be."""

from __future__ import annotations

from typing import Final

from ckptd.limits import PAGE_ALIGNMENT

HEADER_BYTES: Final = PAGE_ALIGNMENT  #: the data region begins here


def page_up(length: int) -> int:
    """The next multiple of a page's length."""
    return -(-length // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def needed_bytes(data_bytes: int, descriptor_bytes: int) -> int:
    """The size of a slot that can hold a snapshot of these lengths."""
    return HEADER_BYTES + page_up(data_bytes) + page_up(descriptor_bytes)


def streamed_bytes(data_bytes: int, descriptor_bytes: int) -> int:
    """The length of a sealed slot's region from its data to the end of its descriptor: what is streamed of it."""
    return page_up(data_bytes) + descriptor_bytes
