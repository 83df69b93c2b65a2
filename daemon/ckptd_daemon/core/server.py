"""The daemon's loop: its sockets, threads, verifier, timers and signals. It never waits for a disk."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Final

import zmq

from ckptd_daemon.core.endpoint import Endpoint, StreamEndpoint
from ckptd_daemon.core.service import Service
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.verify.verifier_process import Verifier

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
#: So long after something has come in, chores are done. At once they would hold the interpreter's lock, and so keep
#: the disk's thread from what has just been pushed; a small snapshot waits for the disk by then.
_CHORES_AFTER_S: Final = 0.002
_MESSAGES_A_TURN_S: Final = 0.02  #: for so long messages are taken, then what the threads have done is
_PIECES_A_TURN: Final = 16
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Counts the signals that ask the daemon to leave, and makes the loop look.

    SIGINT and SIGHUP stay ignored where they are at the start: who started it with nohup, or in the background of
    a script, wants it to outlive the terminal. SIGTERM is always heard.

    Args:
        leave_at_once: Called for the second one, from wherever the main thread is. Must not return.
    """

    def __init__(self, leave_at_once: Callable[[], None]) -> None:
        self.count = 0
        self._leave_at_once = leave_at_once
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._before = [
            (number, signal.signal(number, self._caught)) for number in _SIGNALS if _heard(number)
        ]

    def fileno(self) -> int:
        return self._wake

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def close(self) -> None:
        for number, before in self._before:
            signal.signal(number, before)
        os.close(self._wake)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self._leave_at_once()
        os.eventfd_write(self._wake, 1)


def _heard(number: signal.Signals) -> bool:
    return number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN


class Server:
    """The loop.

    Args:
        endpoint: The bound socket.
        inlet: The one for streams.
        service: Answers.
        workers: The threads whose results are delivered here.
        verifier: Whose reports are read here.
        signals: Ask it to leave.
        grace_s: How long attached clients are served after the first signal.
        idle_exit_s: Leave after so long without an attached client and without work; None: never.
        housekeeping: Called soon after each turn, at least once a second.
        now: A monotonic clock in seconds.
    """

    def __init__(
        self, endpoint: Endpoint, inlet: StreamEndpoint, service: Service, workers: Iterable[Worker], verifier: Verifier,
        signals: Signals, *, grace_s: float, idle_exit_s: float | None,
        housekeeping: Callable[[], None] = lambda: None, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._housekeeping = housekeeping
        self._endpoint, self._inlet = endpoint, inlet
        self._service, self._workers = service, list(workers)
        self._verifier, self._signals, self._now = verifier, signals, now
        self._grace_s, self._idle_exit_s = grace_s, idle_exit_s
        self._idle_since = now()
        self._closes_at: float | None = None
        self._chores_at: float | None = None
        self._polled: set[int] = set()
        self._ended_looked_at = now()
        self._poller = zmq.Poller()
        for socket in (
            endpoint.socket, inlet.socket, endpoint.connections.news, inlet.connections.news,
        ):  # fmt: skip
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Serve until it is time to leave: everything accepted is written by then, or kept in its slot."""
        while not self._may_leave():
            self._turn()

    def finish(self) -> None:
        """Answer what came in while nobody is let in any more."""
        self._service.clients.closed = True
        self._service.clients.leaving = self._service.clients.leaving or "idle"
        self._receive()

    def _turn(self) -> None:
        self._watch_descriptors()
        events = dict(self._poller.poll(int(1000 * (_CHORES_AFTER_S if self._chores_at else _TICK_S))))
        if self._signals.fileno() in events:
            self._signals.clear()
        for one in (self._endpoint, self._inlet):
            if one.connections.news in events:
                one.connections.look()
        if self._endpoint.socket in events:
            self._receive()
        if self._inlet.socket in events:
            self._receive_pieces()
        for worker in self._workers:
            if worker.fileno() in events:
                worker.deliver()
        for run, report in self._verifier.read_reports():
            self._service.pipeline.report(run, report)
        self._look_for_ended(events)
        self._do_chores(put_off=bool(events))

    def _do_chores(self, *, put_off: bool) -> None:
        now = self._now()
        if put_off and self._chores_at is None:
            self._chores_at = now + _CHORES_AFTER_S
        if put_off and now < (self._chores_at or now):
            return
        self._chores_at = None
        for worker in self._workers:
            worker.deliver()  # what it didn't wake this thread for
        self._service.pipeline.retry()
        self._housekeeping()

    def _look_for_ended(self, events: dict[object, int]) -> None:
        """See to clients that died: when their pidfd says so, and from time to time where there is none."""
        now = self._now()
        ended = any(session.process.pidfd in events for session in self._service.clients.sessions)
        if ended or now - self._ended_looked_at >= _TICK_S:
            self._ended_looked_at = now
            self._service.clients.bury_dead()

    def _receive(self) -> None:
        until = time.monotonic() + _MESSAGES_A_TURN_S
        while self._endpoint.take(self._service.handle):
            if time.monotonic() >= until:  # the others get their turn: nobody may keep the loop busy
                return

    def _receive_pieces(self) -> None:
        streams = self._service.clients.streams
        handle = partial(streams.handle, leaving=self._service.clients.closed)
        for _ in range(_PIECES_A_TURN):
            if not self._inlet.take_piece(handle):
                return

    def _watch_descriptors(self) -> None:
        wanted = {worker.fileno() for worker in self._workers} | {
            self._verifier.fileno(),
            self._signals.fileno(),
        }
        wanted |= {s.process.pidfd for s in self._service.clients.sessions if s.process.pidfd >= 0}
        for fd in self._polled - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._polled:
            self._poller.register(fd, zmq.POLLIN)
        self._polled = wanted

    def _may_leave(self) -> bool:
        now, clients = self._now(), self._service.clients
        if self._closes_at is None:
            self._look_for_reasons(now)
        if self._closes_at is None:
            return False
        if now >= self._closes_at and not clients.closed:
            clients.closed = True
            if attached := clients.sessions.attached():
                log.warning("daemon.grace_over attached=%d", len(attached))
        served = clients.closed or not clients.sessions.attached()
        return served and not self._service.pipeline.busy()

    def _look_for_reasons(self, now: float) -> None:
        clients = self._service.clients
        if self._signals.count:
            self._leave("a signal", self._grace_s, now)
        elif (grace_s := self._service.stop_asked_s) is not None:
            self._leave("asked to stop", grace_s, now)
        elif clients.sessions.attached() or self._service.pipeline.unwritten() or self._verifier.pending:
            self._idle_since = now
        elif self._idle_exit_s is not None and now - self._idle_since >= self._idle_exit_s:
            self._leave("idle", 0.0, now)

    def _leave(self, reason: str, grace_s: float, now: float) -> None:
        clients = self._service.clients
        clients.leaving, self._closes_at = reason, now + grace_s
        log.info(
            "daemon.leaving reason=%s attached=%d unwritten=%d grace_s=%g", reason,
            len(clients.sessions.attached()), len(self._service.pipeline.unwritten()), grace_s,
        )  # fmt: skip
