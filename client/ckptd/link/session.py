"""The client's attachment to whichever daemon serves the root now.

A daemon may die, be replaced, or be stopped under a training run. A session notices, attaches again
under the same client id, and starts a daemon when it may; it never waits longer than it was told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Final, Literal, TypeVar

import ckptd
from ckptd.disk.daemon_record import process_started
from ckptd.disk.durable import is_taken
from ckptd.disk.root_place import RootPlace
from ckptd.disk.rootdir import DaemonRecord, Root
from ckptd.errors import CkptdError, NoDaemon, NoSpace, RootMoved, RunTaken, TimedOut
from ckptd.link import wire
from ckptd.link.autostart import DaemonStart
from ckptd.link.connection import Connection, connect
from ckptd.link.route import Route
from ckptd.link.wire import Attached, Reply, Request

__all__ = ["DaemonMode", "Session"]

log = logging.getLogger(__name__)

DaemonMode = Literal["auto", "attach"]
R = TypeVar("R", bound=wire.Message)

_ATTACH_S: Final = 5.0  # one try to attach; many are made where the bound allows
_ATTACH_IN_PASSING_S: Final = 0.5  # the same for a call that doesn't need the daemon now
_LOOK_EVERY_S: Final = 0.05
_AGAIN_AFTER_S: Final = 1.0
_AGAIN_AFTER_FAILED_START_S: Final = 30.0
_LEAVING_CLIENT_S: Final = 3.0  # a trainer that was killed a moment ago may take this long to be gone


class Session:
    """One client's attachment. Not safe for use by several threads at once.

    Attributes:
        attached: What the daemon said when this session attached last.
        epoch: Counts the attachments; a new number means a new daemon, which must be asked about everything.
    """

    def __init__(self, root: Root, run: str, client_id: str, mode: DaemonMode) -> None:
        self._root, self._run, self._client_id, self._mode = root, run, client_id, mode
        self._connection: Connection | None = None
        self._place: RootPlace | None = None
        self._start: DaemonStart | None = None
        self._start_failed = False
        self._not_before = 0.0
        self._lost = False
        self.attached: Attached | None = None
        self.epoch = 0
        self.trouble: CkptdError | None = None  #: why it isn't attached now

    def __repr__(self) -> str:
        return f"Session({self._root.path}, {self._run}, {'attached' if self.connected else 'lost'})"

    @property
    def connected(self) -> bool:
        """Whether it is attached, as far as it has noticed."""
        return self._connection is not None

    @property
    def alive(self) -> bool:
        """Whether it is attached to a daemon that lives."""
        return self._connection is not None and self._connection.alive()

    @property
    def route(self) -> Route | None:
        """By which way it is attached; None while it isn't."""
        return self._connection.route if self._connection is not None else None

    @property
    def record(self) -> DaemonRecord | None:
        """Which daemon it is attached to; None while it isn't."""
        return self._connection.record if self._connection is not None else None

    @property
    def last_heard(self) -> float:
        """time.monotonic() of the daemon's newest message; 0.0 before the first."""
        return self._connection.last_heard if self._connection is not None else 0.0

    def open(self, timeout_s: float) -> Attached:
        """Attach for the first time, starting a daemon when the mode is "auto".

        Raises:
            NoDaemon: There is none (mode "attach"), or it can't be started.
            NoSpace: It can't be started, because the disk is full.
            RunTaken: The run has a live client.
            RootLocked: Something that is no answering daemon holds the root's lock.
            TimedOut: A daemon lives and doesn't answer within the bound.
        """
        deadline = time.monotonic() + timeout_s
        taken_until = time.monotonic() + min(_LEAVING_CLIENT_S, timeout_s)
        while True:
            self._not_before = 0.0
            if self.attach(max(0.0, deadline - time.monotonic())) and self.attached is not None:
                return self.attached
            trouble = self.trouble
            until = taken_until if isinstance(trouble, RunTaken) else deadline
            if trouble is not None and (time.monotonic() >= until or not self._may_pass(trouble)):
                raise trouble
            time.sleep(_LOOK_EVERY_S)

    def attach(self, timeout_s: float) -> bool:
        """Attach if it isn't; True when it is now. One try; `trouble` says why it is not.

        Args:
            timeout_s: Bound in seconds. With 0.0 it looks in passing: at most half a second, and only when a
                daemon is there that takes connections.
        """
        if self._connection is not None:
            return True
        if time.monotonic() < self._not_before:
            return False
        self._not_before = time.monotonic() + _AGAIN_AFTER_S
        try:
            connection = self._find_daemon(timeout_s)
            if connection is None:
                return False
            self._introduce(connection, min(_ATTACH_S, max(timeout_s, _ATTACH_IN_PASSING_S)))
        except CkptdError as error:
            self.trouble = error
            return False
        except OSError as error:
            self.trouble = _out_of_reach(self._root, "the daemon can't be reached now", error)
            return False
        return True

    def send(self, message: Request) -> int | None:
        """Send without waiting; the message's number, or None when it couldn't be sent."""
        if self._connection is None:
            return None
        try:
            return self._connection.send(message)
        except NoDaemon as error:
            self._lose(error)
        except TimedOut as error:
            self.trouble = error
        return None

    def ask(self, message: Request, kind: type[R], timeout_s: float) -> R:
        """Send and wait for the reply. Raises NoDaemon when not attached, and what Connection.ask raises."""
        if self._connection is None:
            raise self.trouble or NoDaemon("not attached to a daemon", where=str(self._root.path))
        try:
            return self._connection.ask(message, kind, timeout_s)
        except NoDaemon as error:
            self._lose(error)
            raise

    def poll(self, timeout_s: float) -> list[Reply]:
        """What has arrived; waits up to `timeout_s` for the first. Notices a daemon that has died."""
        if self._connection is None:
            return []
        try:
            return self._connection.poll(timeout_s)
        except NoDaemon as error:
            self._lose(error)
            return []

    def check(self) -> None:
        """Look whether the daemon still lives."""
        if self._connection is not None and not self._connection.alive():
            self.poll(_LOOK_EVERY_S)

    def close(self) -> None:
        """Leave without a word. Waits for nothing."""
        self._disconnect()
        if self._place is not None:
            self._place.close()
            self._place = None

    # --- inside ----------------------------------------------------------------------------------

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _check_root(self) -> None:
        """The root that is served is the one this session began with.

        One that was removed, with all in it, may have another in its place, made for this job to go on in: it must
        not have the run already, whose line would be another's.

        Raises:
            RootMoved: It isn't: no daemon is looked for there, and none started.
            OSError: It can't be told.
        """
        if self._place is None:
            self._place = RootPlace(self._root.path)
            return
        try:
            self._place.check()
        except RootMoved:
            path = self._root.path
            if not self._place.removed or not path.is_dir() or is_taken(self._root.run_dir(self._run)):
                raise
            new, old = RootPlace(path), self._place
            Root.open(path, create=False)  # a daemon that is started needs the folder for its log
            self._place = new
            old.close()

    def _find_daemon(self, timeout_s: float) -> Connection | None:
        self._check_root()
        if self._mode == "attach":
            return connect(self._root, timeout_s=max(timeout_s, _ATTACH_IN_PASSING_S))
        if self._start is None:
            self._start = DaemonStart(self._root)
        deadline = time.monotonic() + timeout_s
        try:
            while self._start.ready(max(0.0, deadline - time.monotonic())) is None:
                if time.monotonic() >= deadline:
                    self._not_before = 0.0  # it is coming up; look again at the next call
                    self.trouble = self._start.late(timeout_s)
                    return None
                time.sleep(_LOOK_EVERY_S)
        except (CkptdError, OSError) as error:
            self._start, self._start_failed = None, True
            self._not_before = time.monotonic() + _AGAIN_AFTER_FAILED_START_S
            if isinstance(error, NoSpace) and self.epoch:  # to who saves it is one of the ways to have none
                raise NoDaemon(error.what, where=error.where, seen=error.seen, todo=error.todo) from error
            if isinstance(error, CkptdError):
                raise
            raise _out_of_reach(self._root, "a daemon can't be started", error) from error
        self._start, self._start_failed = None, False
        return connect(self._root, timeout_s=max(timeout_s, _ATTACH_IN_PASSING_S))

    def _introduce(self, connection: Connection, timeout_s: float) -> None:
        pid = os.getpid()
        hello = wire.Attach(
            id=0, protocol=wire.PROTOCOL, run=self._run, client_id=self._client_id, pid=pid,
            pid_started=process_started(pid) or 0, version=ckptd.__version__,
        )  # fmt: skip
        try:
            self.attached = connection.ask(hello, Attached, timeout_s)
        except BaseException:
            connection.close()
            raise
        self._connection, self.trouble = connection, None
        self.epoch += 1
        # As loud as the loss was, so that whoever saw that one sees this one too.
        level, event = (logging.WARNING, "recovered") if self._lost else (logging.INFO, "attached")
        log.log(
            level, "session.%s run=%s pid=%d epoch=%d", event, self._run, connection.record.pid, self.epoch
        )
        self._lost = False

    def _lose(self, error: CkptdError) -> None:
        next_ = "another one is started by itself" if self._mode == "auto" else error.todo
        said = CkptdError(error.what, where=error.where, seen=error.seen, todo=next_)
        log.warning("session.lost run=%s error=%s", self._run, said)
        self._lost = True
        self.trouble, self._not_before = error, 0.0
        with contextlib.suppress(CkptdError):
            self._disconnect()

    def _may_pass(self, trouble: CkptdError) -> bool:
        """Whether a first attachment should try again: a daemon that is leaving makes room for a new one."""
        if isinstance(trouble, NoDaemon):
            return self._mode == "auto" and not self._start_failed
        return isinstance(trouble, (RunTaken, TimedOut))


def _out_of_reach(root: Root, what: str, error: OSError) -> NoDaemon:
    todo = "check the disk, and the limits of open files and processes; it is tried again by itself"
    return NoDaemon(what, where=str(root.path), seen=str(error), todo=todo)
