from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Sequence

import pytest

from ckptd.disk.chunks import Chunk
from ckptd.disk.direct_blocks import DirectBlocks
from ckptd.limits import KIB, MIB, PAGE_ALIGNMENT


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def gathered(segments: Sequence[Chunk], block_bytes: int = 8 * MIB) -> tuple[bytes, list[int], int]:
    """The bytes in order, the addresses of all buffers, and the length said."""
    blocks = DirectBlocks(segments, block_bytes)
    content, addresses = bytearray(), []
    for block in blocks:
        assert sum(map(len, block)) <= block_bytes
        for part in block:
            assert part.nbytes % PAGE_ALIGNMENT == 0 and part.nbytes
            addresses.append(address(part))
            content += part
    return bytes(content), addresses, blocks.nbytes


def in_pages(nbytes: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, nbytes)))
    memory[:nbytes] = os.urandom(nbytes)
    return memory[:nbytes]


@pytest.mark.parametrize("block_bytes", [64 * KIB, 8 * MIB])
def test_any_segments_come_out_whole_in_aligned_pieces_of_whole_pages(block_bytes: int) -> None:
    dice = random.Random(1)
    lengths = (0, 1, 63, 64, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_000, MIB, MIB + 1, 3 * MIB)
    for _ in range(30):
        segments: list[Chunk] = []
        for _ in range(dice.randrange(1, 12)):
            length = dice.choice(lengths)
            memory = in_pages(length + 64)
            start = dice.choice((0, 0, 64))
            segments.append(memory[start : start + length] if dice.random() < 0.7 else os.urandom(length))
        whole = b"".join(segments)
        content, addresses, nbytes = gathered(segments, block_bytes)
        assert nbytes == len(whole)
        assert content == whole.ljust(-(-len(whole) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT, b"\0")
        assert all(at % PAGE_ALIGNMENT == 0 for at in addresses)


def test_large_data_that_is_aligned_in_memory_and_file_is_not_copied() -> None:
    tensor = in_pages(5 * MIB)
    header = b"h" * PAGE_ALIGNMENT
    _, addresses, _ = gathered([header, tensor, header, tensor[: 64 * KIB]])
    inside = [at for at in addresses if address(tensor) <= at < address(tensor) + len(tensor)]
    assert address(tensor) in inside
    assert len(addresses) - len(inside) == 2  # the headers


@pytest.mark.parametrize("before", [b"", b"h" * 32])
def test_data_at_an_odd_place_is_put_together_in_a_buffer_of_bounded_size(before: bytes) -> None:
    odd = in_pages(9 * MIB)[64 : 8 * MIB]
    content, addresses, nbytes = gathered([before, odd])
    assert content[:nbytes] == before + bytes(odd)
    assert not any(address(odd) <= at < address(odd) + len(odd) for at in addresses)
    assert len(set(addresses)) == 1  # one buffer again and again


def test_memory_that_can_not_be_written_to_is_put_together_too() -> None:
    data = os.urandom(2 * MIB)
    assert gathered([memoryview(data)])[0] == data


@pytest.mark.parametrize("segments", [[], [b""], [b"", memoryview(b"")]])
def test_nothing_is_no_block(segments: list[Chunk]) -> None:
    assert gathered(segments) == (b"", [], 0)
