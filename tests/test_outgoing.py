"""A snapshot on its way out, and the memory it is staged in."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import pytest

from ckptd.errors import ProtocolError, SharedMemoryTooSmall
from ckptd.limits import MAX_FRAME_BYTES
from ckptd.link.outgoing import Outgoing
from ckptd.link.private_slots import PrivateSlots
from ckptd.snapshot.room import Room
from ckptd.snapshot.slots import Slot, SlotState, needed_bytes
from ckptd_daemon.core.incoming import Incoming

DATA = os.urandom(2 * MAX_FRAME_BYTES + 12_345)
DESCRIPTOR = b"a descriptor"
CLIENT = "ab" * 16


def sealed() -> Slot:
    slot = Slot.anonymous("private", needed_bytes(len(DATA), len(DESCRIPTOR)))
    slot.begin(CLIENT, "default", 1)
    slot.data[: len(DATA)] = DATA
    slot.seal(DESCRIPTOR, len(DATA))
    return slot


@pytest.fixture
def outgoing() -> Iterator[Outgoing]:
    slot = sealed()
    yield Outgoing(slot)
    slot.close()


def test_nothing_is_sent_before_it_is_granted_and_nothing_beyond(outgoing: Outgoing) -> None:
    assert outgoing.next_piece() is None
    outgoing.go_on(0, MAX_FRAME_BYTES + 1)
    first = outgoing.next_piece()
    assert first is not None and (first[0], len(first[2])) == (0, MAX_FRAME_BYTES)
    assert outgoing.next_piece() is None
    outgoing.granted(MAX_FRAME_BYTES, outgoing.total)
    sizes = []
    while (piece := outgoing.next_piece()) is not None:
        sizes.append((piece[0], len(piece[2])))
    assert sizes == [
        (MAX_FRAME_BYTES, MAX_FRAME_BYTES),
        (2 * MAX_FRAME_BYTES, outgoing.total - 2 * MAX_FRAME_BYTES),
    ]


@pytest.mark.parametrize("have", [0, MAX_FRAME_BYTES, 2 * MAX_FRAME_BYTES, 5_000])
def test_it_goes_on_from_wherever_a_daemon_says_with_the_hash_of_all_before(
    outgoing: Outgoing, have: int
) -> None:
    outgoing.go_on(0, outgoing.total)
    whole = b""
    while (piece := outgoing.next_piece()) is not None:
        whole += bytes(piece[2])
    outgoing.go_on(have, outgoing.total)
    start, sha256, data = outgoing.next_piece() or (0, b"", memoryview(b""))
    assert start == have and bytes(data) == whole[have : have + len(data)]
    assert sha256 == hashlib.sha256(whole[: have + len(data)]).digest()


def test_a_daemon_that_has_more_than_there_is_is_not_believed(outgoing: Outgoing) -> None:
    with pytest.raises(ProtocolError, match="more than there is"):
        outgoing.go_on(outgoing.total + 1, outgoing.total + 2)


def test_what_goes_out_comes_in_as_the_same_slot(outgoing: Outgoing) -> None:
    target = Slot.anonymous("stream", needed_bytes(len(DATA), len(DESCRIPTOR)))
    target.begin(CLIENT, "default", 1)
    incoming = Incoming(target, outgoing.data_bytes, outgoing.descriptor_bytes)
    outgoing.go_on(0, outgoing.total)
    header = None
    while (piece := outgoing.next_piece()) is not None:
        assert header is None and target.header().state is SlotState.FILLING
        header = incoming.take(*piece)
    assert header is not None and header.state is SlotState.SEALED
    assert bytes(target.data[: len(DATA)]) == DATA and target.descriptor() == DESCRIPTOR
    target.close()


def test_private_memory_is_made_once_and_used_again_and_replaced_only_when_it_is_too_small() -> None:
    slots = PrivateSlots(CLIENT, "default", 2)
    assert slots.must_grow(10_000)
    slots.reserve(10_000)
    made = list(slots)
    slots.reserve(10_000)
    assert list(slots) == made and len(made) == 2 and not slots.must_grow(10_000)
    busy = slots.find_free(10_000)
    assert busy is not None
    busy.begin(CLIENT, "default", 1)
    assert slots.must_grow(50_000)
    slots.reserve(50_000)
    assert busy in slots and len(list(slots)) == 2
    assert (larger := slots.find_free(50_000)) is not None and larger.capacity >= 50_000
    slots.close()


def test_memory_that_is_not_there_is_refused_before_any_is_taken() -> None:
    slots = PrivateSlots(CLIENT, "default", 2, rooms=lambda: [Room("cgroup x", 150_000, "raise the limit")])
    with pytest.raises(SharedMemoryTooSmall, match=r"in this process.*raise the limit"):
        slots.reserve(100_000)
    assert list(slots) == []
    with pytest.raises(SharedMemoryTooSmall):
        Slot.anonymous("huge", 2**62)
