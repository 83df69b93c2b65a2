"""The connection from one process to the daemon of a root: one DEALER socket, polled by its caller.

There is no thread here and nothing waits without a bound: a daemon that is dead is noticed within a
tenth of a second (pid and start time), one that is stopped or slow costs the caller's timeout. Not
safe for use by several threads at once; in a forked child it does nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq

from ckptd.disk.lock import holder
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import CkptdError, NoDaemon, ProtocolError, TimedOut
from ckptd.limits import MAX_MESSAGE_BYTES
from ckptd.link import wire
from ckptd.link.route import Route, find_route, how_to_start
from ckptd.link.wire import Refused, Reply, Request, StreamRequest

__all__ = ["Connection", "connect"]

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0  #: default bound of connect()

_SLICE_S: Final = 0.1  # how long a wait goes on before it looks whether the daemon still lives
_MAX_QUEUED: Final = 10_000
_CUT_FOR_S: Final = 2.0  # a daemon that leaves ends its connections too, and is gone soon after

R = TypeVar("R", bound=wire.Message)


def connect(root: Root, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
    """Connect to the daemon that daemon.json of `root` names.

    Args:
        root: The opened root.
        timeout_s: Bound in seconds for the daemon to take the connection.

    Raises:
        NoDaemon: None is recorded, it has died, or its socket is gone or not ours.
        TimedOut: It lives but doesn't take the connection (stopped, or very busy).
    """
    record = DaemonRecord.read(root)
    if record is None or not record.alive():
        raise _nobody(root, record)
    connection = Connection(root, record)
    try:
        connection.wait_ready(timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _nobody(root: Root, record: DaemonRecord | None) -> NoDaemon:
    """The error for a record that names no living daemon; another process may hold the root's lock all the same."""
    seen = "none is recorded" if record is None else f"pid {record.pid} has died"
    todo = how_to_start(root)
    if record is None and DaemonRecord.is_closed_to_us(root):
        seen, todo = "whether one is recorded can't be read by this user", "ask as the user whose root it is"
    if (pid := holder(root)) is not None:
        seen += f", but pid {pid} holds the root's lock"
        todo = f"try again: a daemon whose record was removed tells it anew within seconds; else end it (kill {pid})"
    return NoDaemon("no daemon serves this root", where=str(root.path), seen=seen, todo=todo)


class Connection:
    """One connection to one daemon process. A restarted daemon needs a new one.

    Attributes:
        root: The root it serves.
        record: Which daemon process this is.
        route: By which way; None at construction for the one in the record.
        last_heard: time.monotonic() of the newest message from the daemon, 0.0 before the first.
    """

    def __init__(self, root: Root, record: DaemonRecord, route: Route | None = None) -> None:
        self.root, self.record, self.last_heard = root, record, 0.0
        self.route = route or find_route(root, record)
        self._owner_pid = os.getpid()
        self._next_id = 1
        self._early: deque[Reply] = deque(maxlen=_MAX_QUEUED)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # A daemon's socket name is never used again, so there is nothing to reconnect to.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._cuts = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._cut_at: float | None = None
        try:
            self.route.prepare(self._socket)
            self._socket.connect(self.route.endpoint)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._socket.closed else "open"
        return f"Connection({self.root.path}, pid {self.record.pid}, {state})"

    def alive(self) -> bool:
        """Whether the daemon process still runs (a stopped one does), and has not ended this connection for good."""
        return self.record.alive() and not self._is_cut()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the daemon has taken the connection. Raises NoDaemon or TimedOut."""
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(_slice_ms(deadline), zmq.POLLOUT):
            self._check_alive()
            if time.monotonic() >= deadline:
                raise self._no_answer("connect", timeout_s)

    def send(self, message: Request | StreamRequest, piece: memoryview | None = None) -> int:
        """Number and send `message` without waiting for its reply; returns the number.

        Args:
            message: What to send.
            piece: Raw bytes to send behind it. ZeroMQ copies them, without holding the GIL, so that they may be
                changed at once: lending them needs another thread of pyzmq's, which ends before a script does.

        Raises:
            NoDaemon: The daemon has died.
            TimedOut: The daemon has not taken earlier messages, so this one was not sent.
        """
        number = self._next_id
        self._next_id += 1
        data = wire.encode(msgspec.structs.replace(message, id=number))
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                "message too long", seen=f"{len(data)} bytes", wanted=f"at most {MAX_MESSAGE_BYTES}"
            )
        try:
            if piece is None:
                self._socket.send(data, zmq.NOBLOCK)
            else:  # the second part is taken whenever the first was
                self._socket.send(data, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(piece, copy=True)
        except zmq.Again:
            self._check_alive()
            raise self._no_answer("take messages", 0.0) from None
        return number

    def request(self, message: Request, timeout_s: float) -> Reply:
        """Send `message` and wait for its reply. What arrives besides is kept for poll().

        Raises:
            NoDaemon: The daemon has died before it answered.
            TimedOut: No reply within `timeout_s` seconds; the request may still be carried out.
            CkptdError: The daemon refused; the class it names.
        """
        deadline = time.monotonic() + timeout_s
        number = self.send(message)
        while True:
            reply = self._receive(deadline)
            if reply is None:
                raise self._no_answer(type(message).__name__.lower(), timeout_s)
            if reply.id != number:
                self._early.append(reply)
            elif isinstance(reply, Refused):
                raise reply.error.exception()
            else:
                return reply

    def ask(self, message: Request, kind: type[R], timeout_s: float) -> R:
        """As request(), for a reply of class `kind`; ProtocolError when it is another."""
        reply = self.request(message, timeout_s)
        if not isinstance(reply, kind):
            raise ProtocolError(
                "not the reply to this request", where=self.record.endpoint,
                seen=type(reply).__name__, wanted=kind.__name__,
            )  # fmt: skip
        return reply

    def poll(self, timeout_s: float = 0.0) -> list[Reply]:
        """What has arrived without being waited for: notices, and replies to send(). Waits for the first.

        Returns [] when nothing came within `timeout_s` seconds.

        Raises:
            NoDaemon: The daemon has died, and everything it had sent was returned before.
        """
        arrived = list(self._early)
        self._early.clear()
        deadline = time.monotonic() + (0.0 if arrived else timeout_s)
        while (reply := self._next_news(deadline, check=not arrived and timeout_s > 0)) is not None:
            arrived.append(reply)
            deadline = 0.0
        return arrived

    def close(self) -> None:
        """Close the socket. Waits for nothing; may be called twice, and in a forked child."""
        if os.getpid() == self._owner_pid and not self._socket.closed:
            self._socket.disable_monitor()
            self._cuts.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()

    # --- inside ----------------------------------------------------------------------------------

    def _next_news(self, deadline: float, *, check: bool) -> Reply | None:
        while True:
            try:
                return self._receive(deadline, check=check)
            except ProtocolError as error:  # nobody waits for it, so there is nobody to tell
                log.warning("connection.bad_message pid=%d error=%s", self.record.pid, error)

    def _receive(self, deadline: float, *, check: bool = True) -> Reply | None:
        """The next message; None when none came until `deadline`."""
        while True:
            if self._socket.poll(_slice_ms(deadline), zmq.POLLIN):
                reply = wire.decode_reply(self._socket.recv(zmq.NOBLOCK))
                self.last_heard = time.monotonic()
                return reply
            if check:
                # Dead is said only after one more look: its last words may have come in between.
                dead = not self.alive()
                if dead and not self._socket.poll(0, zmq.POLLIN):
                    self._check_alive()
            if time.monotonic() >= deadline:
                return None

    def _is_cut(self) -> bool:
        if self._socket.closed or os.getpid() != self._owner_pid:  # a forked child leaves it alone
            return False
        if self._cut_at is None and self._cuts.poll(0):
            self._cut_at = time.monotonic()
        return self._cut_at is not None and time.monotonic() - self._cut_at >= _CUT_FOR_S

    def _check_alive(self) -> None:
        where, pid = str(self.root.path), self.record.pid
        if not self.record.alive():
            todo = how_to_start(self.root)
            raise NoDaemon("the daemon has died", where=where, seen=f"pid {pid} is gone", todo=todo)
        if self._is_cut():
            todo = "attach again; see its log"
            raise NoDaemon(
                "the daemon has ended the connection", where=where, seen=f"pid {pid} lives", todo=todo
            )

    def _no_answer(self, to: str, timeout_s: float) -> CkptdError:
        pid = self.record.pid
        stopped = _process_state(pid) in ("T", "t")
        return TimedOut(
            f"the daemon (pid {pid}) didn't {to}"
            if to in ("connect", "take messages")
            else f"no answer to {to}",
            where=str(self.root.path),
            seen=("the process is stopped" if stopped else "the process lives but is silent")
            + (f" for {timeout_s:.3g} s" if timeout_s else ""),
            todo=f"kill -CONT {pid}" if stopped else f"see {self.record.log}",
        )


def _slice_ms(deadline: float) -> int:
    left = min(deadline - time.monotonic(), _SLICE_S)
    return max(0, int(left * 1000 + 0.999))


def _process_state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
