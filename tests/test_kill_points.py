"""A daemon and its clients, killed at every call that changes something: what was sealed is committed, once, in order.

scripts/torture --only kill_points tells many more stories, and kills the starts after a kill too.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import ProtocolError
from ckptd.snapshot.slots import Slot
from daemon_parts import Places, places_in
from desk_daemon import DeskClient, DeskDaemon
from kill_stories import entries
from snapshots import data_for, descriptor
from torture_places import private_shm

TOLD = list[tuple[Any, ...]]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with places_in(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_call_nothing_sealed_is_lost_or_committed_twice(places: Places) -> None:
    """Every second call of one story: saves, a queue in which one gives way, proofs, retention, clients that come and go."""
    with private_shm() as folder:
        script = str(Path(__file__).with_name("kill_tellings.py"))
        done = subprocess.run(
            [sys.executable, script, "6", "2", str(folder)], env=os.environ | places.env, text=True,
            capture_output=True, check=True, timeout=850,
        )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert found["points"]["SIGKILL in a first run"] > 100


def saved(daemon: DeskDaemon, client: DeskClient, number: int) -> Slot:
    slot = client.free()
    assert slot is not None
    taken = descriptor(number, client_id=client.client_id, snapshot=number)
    client.push(slot, client.seal(slot, taken, bytes(data_for(number))), number)
    return slot


def test_a_slot_that_outlives_retention_unread_is_not_committed_again(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it could free the slot; the next start can't open it, prunes, and is killed too."""
    told: TOLD = []

    def tell(*what: Any) -> None:
        told.append(what)

    with monkeypatch.context() as killed:
        killed.setattr(Slot, "release", lambda slot: (_ for _ in ()).throw(ProtocolError("killed here")))
        first = DeskDaemon(places.root, 1, tell)
        client = DeskClient(first, "a" * 32, os.getpid(), slots=1)
        slot = saved(first, client, 1)
        first.settle(verify=False)
        slot.disown()
        first.close()
    opened = Slot.open

    def not_opened(path: Path) -> Slot:
        if path.name == slot.name:
            raise OSError(errno.EMFILE, "too many open files", str(path))
        return opened(path)

    with monkeypatch.context() as short:
        short.setattr(Slot, "open", not_opened)
        second = DeskDaemon(places.root, 1, tell)
        other = DeskClient(second, "b" * 32, os.getpid())
        for number in (2, 3):
            saved(second, other, number)
            second.settle()
        other.leave()
        second.close()
    assert slot.path.exists()
    third = DeskDaemon(places.root, 1, tell)
    third.settle()
    third.close()
    assert [what[1:] for what in told if what[0] == "writing"] == [
        ("a" * 32, 1),
        ("b" * 32, 2),
        ("b" * 32, 3),
    ]
    assert not slot.path.exists() and entries(places.root)[-1].step == 3


def test_a_slot_whose_maker_was_killed_within_its_first_header_is_given_back(places: Places) -> None:
    daemon = DeskDaemon(places.root, 1, lambda *what: None)
    client = DeskClient(daemon, "a" * 32, os.getpid(), slots=1)
    path = client.slots[0].path
    with path.open("r+b") as file:
        file.write(file.read(100))
        file.seek(100)
        file.write(bytes(4096 - 100))
    daemon.close()
    DeskDaemon(places.root, 1, lambda *what: None).close()
    assert not path.exists()
