"""Serving clients by TCP on this machine: which addresses are allowed, and who gets in.

Any user of the machine can reach a port. CurveZMQ lets in only who holds the client's secret key, which is made for
each daemon process and lies in daemon.json, readable by this user alone.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Final

import zmq

from ckptd.errors import InvalidArgument

__all__ = ["DOMAIN", "Doorkeeper", "Keys", "check_listen"]

DOMAIN: Final = b"ckptd"

_ADDRESS: Final = re.compile(r"tcp://([0-9.]{7,15}):([0-9]{1,5})", re.ASCII)


def check_listen(address: str) -> str:
    """The ZeroMQ address for what a user asked to listen at.

    Raises:
        InvalidArgument: Not an address of this machine's loopback, and a port (0: any free one).
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not _is_loopback(match[1]) or int(match[2]) > 65535:
        raise InvalidArgument(
            "can't listen there", where="--listen", seen=address, wanted="tcp://127.0.0.1:PORT, 0 for any free port",
            todo="only this machine's loopback is served for now: client and daemon see the same disk",
        )  # fmt: skip
    return f"tcp://{match[1]}:{match[2] if int(match[2]) else '*'}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one daemon process, Z85 text as ZeroMQ has it. The secret ones are never printed."""

    server: str
    server_secret: bytes = field(repr=False)
    client_secret: str = field(repr=False)

    @classmethod
    def make(cls) -> Keys:
        server, server_secret = zmq.curve_keypair()
        _, client_secret = zmq.curve_keypair()
        return cls(server.decode("ascii"), server_secret, client_secret.decode("ascii"))


class Doorkeeper:
    """Lets into the sockets of a context only who has the client's key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # brings asyncio along: only where it is asked for

        self._client = zmq.curve_public(keys.client_secret.encode("ascii"))
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(DOMAIN.decode("ascii"), self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key may come in."""
        return key == self._client

    def close(self) -> None:
        self._thread.stop()
