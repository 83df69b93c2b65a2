"""Somebody who speaks to a daemon's socket without libzmq: ZMTP 3 by hand, as far as wanted."""

from __future__ import annotations

import socket
import struct
from typing import Final

GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG = 1, 2


def connected(endpoint: str) -> socket.socket:
    """A connection to an ipc:// or tcp:// endpoint that has said nothing yet."""
    if endpoint.startswith("ipc://"):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(10.0)
        peer.connect(endpoint.removeprefix("ipc://"))
        return peer
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10.0)


def shaken(endpoint: str, identity: bytes = b"") -> socket.socket:
    """One that has shaken hands, as a DEALER. Raises OSError when it was cut off meanwhile."""
    peer = connected(endpoint)
    try:
        peer.sendall(GREETING)
        got = 0
        while got < len(GREETING):
            got += len(_some(peer, len(GREETING) - got))
        peer.sendall(_ready(identity))
        _some(peer, 1000)
    except OSError:
        peer.close()
        raise
    return peer


def frame(data: bytes, *, more: bool = False) -> bytes:
    """One frame of a message."""
    if len(data) < 256:
        return bytes([_MORE if more else 0, len(data)]) + data
    return bytes([_LONG | (_MORE if more else 0)]) + struct.pack(">Q", len(data)) + data


def _ready(identity: bytes) -> bytes:
    properties = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    body = b"\x05READY" + b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in properties
    )
    return b"\x04" + bytes([len(body)]) + body


def _some(peer: socket.socket, count: int) -> bytes:
    data = peer.recv(count)
    if not data:
        raise ConnectionAbortedError("cut off")
    return data
