"""The daemon's sockets: one ROUTER for messages, one for the pieces of streamed snapshots.

Both are bound to a path that only this user can reach and, when asked, to a port of this machine too: there
CurveZMQ keeps everybody out who can't read the keys in daemon.json, before a byte of theirs reaches the daemon.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq

from ckptd.disk.durable import is_taken
from ckptd.errors import BadRoot
from ckptd.limits import MAX_FRAME_BYTES, MAX_REQUEST_BYTES
from ckptd.link import wire
from ckptd_daemon.core.connections import Connections, cut_all
from ckptd_daemon.core.dropped import Dropped
from ckptd_daemon.core.loopback import DOMAIN, Keys

__all__ = ["Endpoint", "StreamEndpoint", "last_words"]

_QUEUED_MESSAGES: Final = 1_000
_QUEUED_PIECES: Final = 4  #: per connection; more than was granted is refused anyway
_ENCRYPTION_BYTES: Final = 1024  # what CurveZMQ adds to a piece; more would cut the connection
_HANDSHAKE_MS: Final = 5_000  # who connects and says nothing is cut off
_LAST_WORDS_MS: Final = 1_000


class Endpoint:
    """The ROUTER socket. Its paths are removed when it is closed.

    Attributes:
        address: Where it was bound last.
        connections: Bounds how many there are.

    Raises:
        BadRoot: Something is at its path already; it is left alone.
    """

    _most_bytes = MAX_REQUEST_BYTES
    _most_queued = _QUEUED_MESSAGES

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, self._most_bytes)
        self.socket.setsockopt(zmq.RCVHWM, self._most_queued)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so when a connection is gone, don't swallow it
        self.address = ""
        self.connections = Connections(self.socket)
        self._dropped = Dropped()
        self._paths: list[Path] = []
        self._ports: list[tuple[str, int]] = []
        try:
            self.bind(path)
        except BaseException:
            self.close()
            raise

    def bind(self, path: Path) -> None:
        """Take connections at this path, from now on the only one told. Those that stand are kept.

        Raises:
            BadRoot: Something is there already; it is left alone.
            zmq.ZMQError: It can't be bound.
        """
        if is_taken(path):  # libzmq would replace it without a word, even a regular file
            raise BadRoot(
                "the socket's path is taken", where=str(path), todo="start again: the name is random"
            )
        self.socket.bind(f"ipc://{path}")  # never unbound before the end: that would cut connections
        self._paths.append(path)
        self.address = f"ipc://{path}"

    def listen(self, address: str, keys: Keys) -> str:
        """Take connections of those who hold the keys at a TCP address too; returns it with its port.

        Raises:
            BadRoot: It can't be bound.
        """
        options = ((zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, keys.server_secret), (zmq.ZAP_DOMAIN, DOMAIN))
        for option, value in (*options, (zmq.ZAP_ENFORCE_DOMAIN, 1)):
            self.socket.setsockopt(option, value)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise BadRoot(
                "can't listen there", where=address, seen=str(error), todo="take another port"
            ) from error
        finally:  # options hold for what is bound after them, which is local: the doorkeeper lets all of that in
            self.socket.setsockopt(zmq.CURVE_SERVER, 0)
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        self._ports.append((host, int(port)))
        return bound

    def in_place(self) -> bool:
        """Whether there is a socket at the path that was told last: its name is random, nobody else makes it."""
        try:
            return stat.S_ISSOCK(self._paths[-1].lstat().st_mode)
        except OSError:
            return False

    def send(self, identity: bytes, message: wire.Reply) -> bool:
        """Send without waiting; False when the connection is gone.

        What it doesn't take is dropped: its client asks again.
        """
        try:
            self.socket.send_multipart([identity, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._dropped.note(type(message).__name__, str(error))
            return error.errno != errno.EHOSTUNREACH
        return True

    def take(self, handle: Callable[[bytes, bytes], object]) -> bool:
        """Hand over (identity, data) of the next message, if it has the form of one; False when there is none now.

        One at a time, whatever its form: whoever sends nothing but nonsense gets his share of the loop, and no more.
        """
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) == 2:
            handle(frames[0], frames[1])
        else:
            self._dropped.note("frames", f"{len(frames)} frames")
        return True

    def cut_off(self) -> int:
        """End all connections, and with them what has come of unfinished messages; how many there were."""
        return cut_all({*map(str, self._paths), *self._ports})

    def close(self, linger_ms: int = 0) -> None:
        self.connections.close()
        self.socket.close(linger=linger_ms)
        self.context.term()
        for path in self._paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class StreamEndpoint(Endpoint):
    """The same for streams: its messages are larger, and fewer wait."""

    _most_bytes = MAX_FRAME_BYTES + _ENCRYPTION_BYTES
    _most_queued = _QUEUED_PIECES

    def take_piece(self, handle: Callable[[bytes, bytes, memoryview | None], object]) -> bool:
        """The same with the raw bytes, if there are any."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if len(frames) in (2, 3):
            handle(frames[0].bytes, frames[1].bytes, frames[2].buffer if len(frames) == 3 else None)
        else:
            self._dropped.note("frames", f"{len(frames)} frames")
        return True


def last_words(endpoint: Endpoint) -> None:
    """Close the socket, but give what was sent a moment to arrive."""
    endpoint.close(_LAST_WORDS_MS)
