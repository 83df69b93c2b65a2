"""A client that is closed stays so: its tickets tell what was known, and take the run from nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import CkptdError, ClientClosed
from ckptd.link import wire
from ckptd_places import places
from fake_daemon import FakeDaemon, wait_until

__all__ = ["places"]


@pytest.fixture
def fake(places: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(Root.open(places, create=True)) as fake:
        yield fake


def client_of(fake: FakeDaemon, **options: Any) -> ckptd.Client:
    return ckptd.Client(fake.root.path, daemon="attach", start_timeout_s=60.0, **options)


def state() -> dict[str, Any]:
    return {"weights": np.zeros(1000)}


def attachments(fake: FakeDaemon) -> int:
    return sum(isinstance(request, wire.Attach) for request in fake.requests)


def look_at_once(client: ckptd.Client) -> None:
    """The next look attaches where it may, however short ago the last one was."""
    client._writer._link.session._not_before = 0.0  # type: ignore[union-attr]


def test_its_tickets_tell_what_was_known_and_attach_to_no_daemon(fake: FakeDaemon) -> None:
    with client_of(fake) as client:
        ticket = client.snapshot(1, state()).wait(timeout_s=60.0)
    asked = len(fake.requests)
    look_at_once(client)
    assert ticket.state in ("committed", "verified")
    assert ticket.wait("committed") is ticket
    assert (attachments(fake), len(fake.requests)) == (1, asked)


def test_who_waits_for_what_it_can_not_tell_any_more_is_told_that_it_is_closed(fake: FakeDaemon) -> None:
    with client_of(fake) as client:
        ticket = client.snapshot(1, state()).wait(timeout_s=60.0)
    look_at_once(client)
    with pytest.raises(ClientClosed, match="the client is closed"):
        ticket.wait("verified", timeout_s=60.0)
    assert attachments(fake) == 1


def test_who_waits_in_another_thread_while_it_is_closed_is_told_too(fake: FakeDaemon) -> None:
    client = client_of(fake)
    ticket = client.snapshot(1, state()).wait(timeout_s=60.0)
    said: list[CkptdError] = []

    def wait() -> None:
        try:
            ticket.wait("verified", timeout_s=30.0)
        except CkptdError as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: any(isinstance(r, wire.Hurry) and r.verified for r in fake.requests))
    client.close()
    thread.join(60)
    assert [type(error) for error in said] == [ClientClosed]
    assert attachments(fake) == 1
