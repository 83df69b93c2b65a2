from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import ProtocolError
from ckptd.snapshot.slots import Slot, needed_bytes
from ckptd_daemon.core.incoming import Incoming

DATA = bytes(range(200)) * 50


@pytest.fixture
def incoming(tmp_path: Path) -> Iterator[Incoming]:
    """Half of it is there."""
    slot = Slot.create(tmp_path / "slot", needed_bytes(len(DATA), 10))
    slot.begin("ab" * 16, "default", 1)
    made = Incoming(slot, len(DATA), 10)
    made.take(0, hashlib.sha256(DATA[:5000]).digest(), memoryview(DATA[:5000]))
    yield made
    slot.close()


@pytest.mark.parametrize("offset", [0, 4999, 5001])
def test_a_piece_of_another_place_overwrites_nothing_though_its_hash_is_right(
    incoming: Incoming, offset: int
) -> None:
    piece, upto = memoryview(DATA[5000:8000]), hashlib.sha256(DATA[:8000]).digest()
    with pytest.raises(ProtocolError, match="not the piece that comes next"):
        incoming.take(offset, upto, piece)
    assert (incoming.have, bytes(incoming.slot.data[:5000])) == (5000, DATA[:5000])
    incoming.take(5000, upto, piece)
    assert bytes(incoming.slot.data[:8000]) == DATA[:8000]


@pytest.mark.parametrize("nbytes", [0, 2**15])
def test_a_piece_of_nothing_or_of_more_than_is_to_come_is_refused(incoming: Incoming, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="not the piece that comes next"):
        incoming.take(5000, bytes(32), memoryview(bytes(nbytes)))
    assert incoming.have == 5000
