"""The daemon's sockets hand over one message at a time, whatever form it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ckptd_daemon.core.endpoint import Endpoint, StreamEndpoint


class Bound:
    """An endpoint with one peer, and what it handed over."""

    def __init__(self, kind: type[Endpoint], path: Path) -> None:
        self.endpoint, self.handed = kind(path), list[tuple[Any, ...]]()
        self.peer = zmq.Context.instance().socket(zmq.DEALER)
        self.peer.connect(self.endpoint.address)

    def take(self) -> bool:
        """The next message, which is on its way."""
        assert self.endpoint.socket.poll(60_000)
        if isinstance(self.endpoint, StreamEndpoint):
            return self.endpoint.take_piece(self._handed)
        return self.endpoint.take(self._handed)

    def _handed(self, _identity: bytes, *rest: Any) -> None:
        self.handed.append(tuple(part if part is None else bytes(part) for part in rest))


@pytest.fixture(params=[Endpoint, StreamEndpoint])
def bound(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bound]:
    made = Bound(request.param, tmp_path / "socket")
    yield made
    made.peer.close(linger=0)
    made.endpoint.close()


def test_nonsense_is_taken_one_message_at_a_time_and_handed_to_nobody(bound: Bound) -> None:
    for _ in range(3):
        bound.peer.send_multipart([b"", b"much", b"too", b"much"])
    bound.peer.send(b"a word")
    assert [bound.take() for _ in range(3)] == [True] * 3
    assert bound.handed == []
    assert bound.take() and [handed[0] for handed in bound.handed] == [b"a word"]


def test_without_a_message_nothing_is_taken(tmp_path: Path) -> None:
    endpoint = StreamEndpoint(tmp_path / "socket")
    try:
        assert not endpoint.take(pytest.fail) and not endpoint.take_piece(pytest.fail)
    finally:
        endpoint.close()


def test_a_piece_comes_with_its_bytes_or_without(tmp_path: Path) -> None:
    bound = Bound(StreamEndpoint, tmp_path / "socket")
    try:
        bound.peer.send_multipart([b"head", b"bytes"])
        bound.peer.send(b"head")
        assert bound.take() and bound.take()
        assert bound.handed == [(b"head", b"bytes"), (b"head", None)]
    finally:
        bound.peer.close(linger=0)
        bound.endpoint.close()
