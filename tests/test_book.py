"""What the daemon's loop knows of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import ckptd
from ckptd.errors import CheckpointWarning
from ckptd_daemon.core.book import Book
from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_places import places

__all__ = ["places"]

ME, OTHER = "a" * 32, "b" * 32


def test_lost_is_what_others_could_not_have_written_and_nothing_newer_has_replaced() -> None:
    book = Book("f" * 32, 1, {})
    for number, (client_id, state) in enumerate(
        [
            (OTHER, State.FAILED),
            (OTHER, State.COMMITTED),
            (OTHER, State.FAILED),
            (ME, State.FAILED),
            (OTHER, State.STAGED),
        ],
        1,
    ):
        book.ledger.add(Snapshot("r", client_id, number, number, None, state, number))
    assert book.lost(ME) == 2
    book.last_committed = book.ledger.get(OTHER, 2)
    assert book.lost(ME) == 1
    assert book.lost(OTHER) == 1


def test_a_restore_says_that_an_earlier_clients_snapshot_was_lost_before_it_came(places: Path) -> None:
    with ckptd.Client(places) as client:
        client.snapshot(1, {"x": [1]}).wait()
        session = client._writer._link.session  # type: ignore[union-attr]
        session.attached = msgspec.structs.replace(session.attached, lost=1)  # type: ignore[type-var]
        with pytest.warns(
            CheckpointWarning, match=r"1 snapshot\(s\) of an earlier client could not be written"
        ):
            assert client.restore({"x": [0]}) is not None
