"""How many connections a socket takes: each costs a descriptor, and who has none left can save nothing.

Worse, libzmq 4.3.5 ends the process when it finds no descriptor for who connects to an ipc:// socket. So those who
come while few are free are cut off at once; libzmq's clients try again by themselves.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Collection, Iterator
from typing import Final

import zmq

from ckptd_daemon.core.dropped import Dropped

__all__ = ["Connections", "allow_descriptors", "cut_all"]

#: Left free for files, slots and threads, and for who connects before the loop looks; half of all where that is less.
RESERVE: Final = 1024
_MOST_DESCRIPTORS: Final = 65_536
_EVENT: Final = struct.Struct("=HI")  # libzmq's: event, and for an accepted connection its descriptor


def allow_descriptors() -> None:
    """Let this process have as many descriptors as it may: usually it starts with far fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connections:
    """Those to one socket. Of the loop's thread.

    Args:
        watched: The socket.

    Attributes:
        news: Readable when somebody has connected; `look` then.
    """

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self.news = watched.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._watched, self._dropped = watched, Dropped()

    def look(self) -> None:
        """See to those who have connected since."""
        while True:
            try:
                event = self.news.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                return
            if len(event) == _EVENT.size and few_left():
                _cut(_EVENT.unpack(event)[1])
                self._dropped.note("connection", "too few descriptors are left")

    def close(self) -> None:
        """Watch no more."""
        self._watched.disable_monitor()
        self.news.close(linger=0)


def cut_all(names: Collection[object]) -> int:
    """End all connections to sockets bound to these: paths, or (host, port). How many there were."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _borrowed(int(number)) as one:  # it is no socket, or gone by now
            if one.getsockname() in names and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A descriptor that stays libzmq's, as a socket."""
    one = socket.socket(fileno=fd)
    try:
        yield one
    finally:
        one.detach()


def few_left() -> bool:
    """Whether fewer descriptors than the reserve are free. The lowest free number tells: they are given in order."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        lowest = os.open("/", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    return lowest >= limit - min(RESERVE, limit // 2)


def _cut(fd: int) -> None:
    """End a connection: libzmq sees that and closes it. It may be another one by now, which then comes again."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
