"""What others find the daemon by, kept in place: daemon.json, its socket, the root's id and the lock file.

Somebody may remove any of them while it runs (a cleaner of /tmp, an rm -r too many). Clients would then find
nobody, could start nobody, because the lock is held, and nobody could tell the daemon to leave.
"""

from __future__ import annotations

import dataclasses
import logging
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import zmq

from ckptd.disk.lock import RootLock
from ckptd.disk.root_id import restore_id
from ckptd.disk.rootdir import DaemonRecord
from ckptd.errors import CkptdError, RootMoved

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 2.0


class Socket(Protocol):
    """What is bound: core.endpoint.Endpoint."""

    address: str

    def in_place(self) -> bool: ...
    def bind(self, path: Path) -> None: ...


class Submit(Protocol):
    """core.disk.Disk.submit."""

    def __call__(
        self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool = False
    ) -> object: ...


class Publication:
    """Of the loop's thread, but for the files below the root: those are looked at and written in the disk's.

    Args:
        lock: The root's lock, held.
        record: What daemon.json is to say.
        endpoint: The bound socket.
        submit: Has something done by the disk's thread.
        root_lost: Called once the locked folder isn't at the root's path any more. Needn't return.
        now: A monotonic clock in seconds.
        inlet: The bound socket for streams, if any.

    Attributes:
        record: What daemon.json says; a new one when the socket had to be bound again.
    """

    def __init__(
        self, lock: RootLock, record: DaemonRecord, endpoint: Socket, submit: Submit,
        root_lost: Callable[[RootMoved], None], now: Callable[[], float] = time.monotonic, inlet: Socket | None = None,
    ) -> None:  # fmt: skip
        self._inlet = inlet
        self.record = record
        self._lock, self._root, self._endpoint, self._submit = lock, lock.root, endpoint, submit
        self._root_lost, self._now = root_lost, now
        self._looks_at, self._looking, self._problem = now() + LOOK_EVERY_S, False, ""
        self._mutex, self._withdrawn = threading.Lock(), False

    def publish(self) -> None:
        """From now on clients come."""
        self.record.write(self._root)

    def withdraw(self) -> None:
        """Nobody new comes any more, whatever a look that is under way finds."""
        with self._mutex:
            self._withdrawn = True
            self.record.remove(self._root)

    def look(self) -> None:
        """Every few seconds, see whether all is in place, and put back what isn't."""
        now = self._now()
        if self._looking or now < self._looks_at:
            return
        self._looks_at, self._looking = now + LOOK_EVERY_S, True
        if not self._endpoint.in_place():
            self._bind_again()
        if self._inlet is not None and not self._inlet.in_place():
            self._bind_inlet_again(self._inlet)
        self._submit(self._restore, self._looked, urgent=True)

    def _bind_again(self) -> None:
        try:
            self._endpoint.bind(self._root.new_socket_path())
        except (CkptdError, OSError, zmq.ZMQError) as error:
            self._say_problem(error)
            return
        log.warning("socket.bound_again was=%s endpoint=%s", self.record.endpoint, self._endpoint.address)
        self.record = dataclasses.replace(self.record, endpoint=self._endpoint.address)

    def _bind_inlet_again(self, inlet: Socket) -> None:
        """At its old path, which attached clients know."""
        try:
            inlet.bind(Path(inlet.address.removeprefix("ipc://")))
            log.warning("socket.bound_again endpoint=%s", inlet.address)
        except (CkptdError, OSError, zmq.ZMQError) as error:
            self._say_problem(error)

    def _restore(self) -> list[str]:
        """Put the files back; returns which. Raises RootMoved: at the root's path nothing is ours to write."""
        with self._mutex:
            if self._withdrawn:
                return []
            self._lock.place.check()
            return self._restore_files()

    def _restore_files(self) -> list[str]:
        restored = []
        service = self._root.service_dir
        if not service.exists():
            service.mkdir(mode=0o700)
            restored.append(service.name)
        if not stat.S_ISDIR(service.lstat().st_mode):
            raise NotADirectoryError(f"{service} is not a folder")
        if self._lock.restore():
            restored.append("lock")
        if restore_id(self._root.path, service, self._root.id):
            restored.append("root.json")
        if DaemonRecord.read(self._root) != self.record:
            self.record.write(self._root)
            restored.append("daemon.json")
        return restored

    def _looked(self, found: list[str] | Exception) -> None:
        self._looking = False
        if isinstance(found, RootMoved):
            self._root_lost(found)
        elif isinstance(found, Exception):
            self._say_problem(found)
        else:
            self._problem = ""
            if found:
                log.warning("daemon.published_again restored=%s", ",".join(found))

    def _say_problem(self, error: Exception) -> None:
        # once, not every few seconds; the text of an error may hold a random name
        problem = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        if problem != self._problem:
            log.error("daemon.not_published error=%s", error)
        self._problem = problem
