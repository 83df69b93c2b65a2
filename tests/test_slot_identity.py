"""A slot's header and its descriptor are of one snapshot, or nobody takes what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from ckptd.disk.rootdir import Root
from ckptd.errors import ProtocolError
from ckptd.link.earlier import accepted_in
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.sealed_slot import SealedSlot
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.series.settings_file import Settings
from daemon_parts import descriptor_of, slot_size

CLIENT, OTHER = "ab" * 16, "cd" * 16


@pytest.fixture(params=[(CLIENT, "other", 1, 3), (OTHER, "default", 1, 3), (CLIENT, "default", 2, 3),
                        (CLIENT, "default", 1, 2)],
                ids=["run", "client", "snapshot", "bytes"])  # fmt: skip
def slot(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slot]:
    """Its descriptor is of the first snapshot of a client; its header differs from that in one thing."""
    made = Slot.create(tmp_path / "slot", slot_size(3))
    client, run, number, data_bytes = request.param
    made.begin(client, run, number)
    made.seal(encode(descriptor_of(CLIENT, 1, b"abc")), data_bytes)
    yield made
    made.close()


def test_what_is_of_another_snapshot_is_not_written(slot: Slot, tmp_path: Path) -> None:
    def commit(*_: object, **_how: object) -> NoReturn:
        pytest.fail("nothing is to be written")

    disk = Disk(Root.open(tmp_path / "root", create=True), Settings(), commit=commit)
    with pytest.raises(ProtocolError, match="of another snapshot"):
        disk.write(slot, 1, lambda _: None)


def test_what_is_of_another_snapshot_is_not_restored(slot: Slot) -> None:
    with SealedSlot(slot.path) as sealed, pytest.raises(ProtocolError, match="of another snapshot"):
        accepted_in(sealed)
