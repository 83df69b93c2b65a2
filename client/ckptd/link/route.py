"""By which way a daemon is reached: its socket's path or, where that can't be seen, its TCP port of this machine."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import NoDaemon
from ckptd.link.wire import Attached

__all__ = ["Route", "find_route", "how_to_start", "stream_route"]

_LOOPBACK: Final = re.compile(r"tcp://127\.[0-9.]{5,11}:[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Route:
    """Where to connect, and with which keys (CurveZMQ's, Z85 text; "" for a socket's path).

    Attributes:
        endpoint: ZeroMQ endpoint.
        server_key: The daemon's public key.
        client_secret: The secret key of who may connect.
    """

    endpoint: str
    server_key: str = ""
    client_secret: str = field(default="", repr=False)

    @property
    def is_tcp(self) -> bool:
        return bool(self.server_key)

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Give a socket its keys, before it connects. Raises NoDaemon when they can't be keys."""
        if not self.is_tcp:
            return
        try:
            secret = self.client_secret.encode("ascii")
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key.encode("ascii"))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        except (zmq.ZMQError, ValueError) as error:
            raise NoDaemon("the keys in daemon.json can't be used", where=self.endpoint) from error


def find_route(root: Root, record: DaemonRecord) -> Route:
    """The way to the daemon of `record`. Raises NoDaemon when there is none that can be trusted."""
    seen = _problem(record.endpoint)
    if not seen:
        return Route(record.endpoint)
    if _LOOPBACK.fullmatch(record.tcp):
        return Route(record.tcp, record.tcp_server_key, record.tcp_client_secret)
    raise NoDaemon(
        "the endpoint in daemon.json can't be used", where=record.endpoint, seen=seen,
        wanted=f"a socket of user {os.geteuid()}",
        todo=f"stop pid {record.pid}, then {how_to_start(root)}",
    )  # fmt: skip


def stream_route(route: Route, attached: Attached) -> Route:
    """The way for streams, beside the one that a client attached by. Raises NoDaemon when it can't be used."""
    if not route.is_tcp:
        if seen := _problem(attached.stream):
            raise NoDaemon("the endpoint for streams can't be used", where=attached.stream, seen=seen)
        return Route(attached.stream)
    if not _LOOPBACK.fullmatch(attached.stream_tcp):
        raise NoDaemon("the endpoint for streams can't be used", where=attached.stream_tcp)
    return Route(attached.stream_tcp, route.server_key, route.client_secret)


def how_to_start(root: Root) -> str:
    return f"start one with: ckptd start --root {root.path} --detach"


def _problem(endpoint: str) -> str:
    """Why an endpoint isn't a socket of this user: daemon.json may be a copy from elsewhere. "" when it is one."""
    try:
        found = Path(endpoint.removeprefix("ipc://")).lstat()
    except (OSError, ValueError) as error:
        return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    if not endpoint.startswith("ipc:///") or not stat.S_ISSOCK(found.st_mode):
        return "not a socket"
    return f"owned by user {found.st_uid}" if found.st_uid != os.geteuid() else ""
