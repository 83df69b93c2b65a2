"""Saving without a daemon: each snapshot is committed before snapshot() returns, under the root's lock.

The same series, lines and write order as the daemon's; no retention and no verifier.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any, Final

from ckptd.disk import durable
from ckptd.disk.commit import commit_snapshot
from ckptd.disk.decisions import settle, write_birth
from ckptd.disk.leftovers import sweep, sweep_run
from ckptd.disk.lineage import Position
from ckptd.disk.lock import RootLock
from ckptd.disk.rootdir import Root
from ckptd.disk.run_index import fold_recent
from ckptd.disk.series_entries import Entry, Series, position_after, read_series
from ckptd.disk.staged_line import Accepted
from ckptd.disk.writing import Writing
from ckptd.errors import (
    CkptdError,
    NoSpace,
    OutcomeUnknown,
    ReadFailed,
    RootLocked,
    RootMoved,
    SaveFailed,
)
from ckptd.link.adoption import adopt_left, sealed_headers
from ckptd.link.earlier import EarlierSlots
from ckptd.link.failures import Failure, Failures
from ckptd.link.headroom import with_headroom
from ckptd.link.staging import Payload
from ckptd.link.ticket import Ticket
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import decode
from ckptd.snapshot.prefault import prefault
from ckptd.warning import warn

__all__ = ["InlineWriter"]

_LEAVING_WRITER_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.05


class InlineWriter:
    """Holds the root's lock from open() to close(). Same public methods as DaemonWriter."""

    def __init__(self, root: Root, run: str, client_id: str, *, failures: Failures) -> None:
        self.lock = threading.RLock()
        self.run_id = ""
        self._root, self._run, self._client_id, self._failures = root, run, client_id, failures
        self._root_lock = RootLock(root)
        self._buffer: mmap.mmap | None = None
        self._next_sequence = 1
        self._seen: tuple[Entry, ...] = ()
        self._writing = Writing()

    def open(self) -> None:
        """Take the lock; clear away what a killed writer left; find or give the run's id; write what waits in slots.

        Raises:
            RootLocked: A daemon or another client writes to this root.
            BadRoot: The root can't be used.
        """
        self._lock_root()
        try:
            run_dir = self._root.run_dir(self._run)
            durable.make_real_dir(run_dir)
            series = read_series(self._root, self._run)  # before the sweep: what it removes carries sequences
            self._next_sequence = series.next_sequence
            if series.decisions.birth_run_id is None:
                _refuse_unread(series)
            for folder in (self._root.path, self._root.service_dir):
                sweep(folder)
            sweep_run(run_dir)
            fold_recent(run_dir)  # only a daemon keeps it up
            self.run_id = series.run_id or uuid.uuid4().hex
            # An unreadable decision may be the birth: a second one would make the run's id doubtful for ever.
            if series.decisions.birth_run_id is not None:
                settle(run_dir)
            elif not series.decisions.unreadable:
                write_birth(run_dir, self.run_id)
            self._write_left()
        except OSError as error:
            self._root_lock.release()
            raise SaveFailed(
                "the run can't be opened", where=self._run, seen=str(error),
                todo="check the disk and the limit of open files, and open the client again",
            ) from error  # fmt: skip
        except BaseException:
            self._root_lock.release()
            raise

    def _lock_root(self) -> None:
        """A writer that was killed holds the lock until its last thread is gone: a moment is given to it."""
        deadline = time.monotonic() + _LEAVING_WRITER_S
        while True:
            try:
                return self._root_lock.acquire()
            except RootLocked:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_EVERY_S)

    def reserve(self, size: int) -> None:
        """Have private memory of `size` bytes, touched. Where there is too little now, `submit` tries again."""
        with contextlib.suppress(SaveFailed):
            self._memory_of(size, size)

    def _memory_of(self, least: int, wanted: int) -> mmap.mmap:
        """Memory of at least so many bytes; where it must be made, as much as is wanted. Raises SaveFailed."""
        if self._buffer is not None and len(self._buffer) >= least:
            return self._buffer
        self._unmap()
        try:
            self._buffer = mmap.mmap(-1, wanted)
        except OSError as error:
            raise SaveFailed(
                "no memory for the copy of the state", where=self._run, seen=f"{wanted} bytes: {error.strerror}",
                todo="free some memory; the next snapshot is tried all the same",
            ) from error  # fmt: skip
        prefault(self._buffer, memoryview(self._buffer), write=True)
        return self._buffer

    def submit(self, ticket: Ticket, payload: Payload, *, busy_timeout_s: float) -> None:
        """Copy and commit; failures are entered and the ticket says so. There is nothing to wait for."""
        with self.lock:
            try:
                buffer = self._memory_of(payload.size, with_headroom(payload.size, grew=True))
            except SaveFailed as error:
                self._not_saved(ticket, error)
                return
            with memoryview(buffer) as memory:
                payload.copy(memory[: payload.data_bytes])
                self._commit(ticket, decode(payload.descriptor), memory[: payload.data_bytes])

    def _commit(self, ticket: Ticket, descriptor: Descriptor, data: memoryview) -> None:
        ticket.become("writing")
        try:
            self._check_root()
            position = self._position(descriptor)
            ticket.sequence = position.sequence
            run_dir = self._root.run_dir(self._run)
            done = commit_snapshot(run_dir, descriptor, data, position, writing=self._writing)
            self._check_root(committed=True)
        except (NoSpace, SaveFailed, OutcomeUnknown) as error:
            self._not_saved(ticket, error)
            return
        finally:
            data.release()
        ticket.path = done.path
        ticket.become("committed")
        self._failures.committed(time.monotonic(), others_wait=False)

    def _check_root(self, *, committed: bool = False) -> None:
        """Raises RootMoved, or OutcomeUnknown when something was committed just now: nobody knows where."""
        try:
            self._root_lock.place.check()
        except OSError as error:
            if not committed:
                raise SaveFailed(
                    "the root can't be looked at", where=str(self._root.path), seen=str(error)
                ) from error
        except RootMoved as error:
            if committed:
                raise OutcomeUnknown(
                    error.what, where=error.where, seen=error.seen, todo=error.todo
                ) from error
            raise

    def _not_saved(self, ticket: Ticket, error: CkptdError) -> None:
        _forget_frames(error)
        ticket.become("unknown" if isinstance(error, OutcomeUnknown) else "failed", error=error)
        self._failures.failed(Failure(ticket.snapshot, ticket.step, error))

    def _position(self, descriptor: Descriptor) -> Position:
        try:
            series = read_series(self._root, self._run, seen=self._seen)
        except OSError as error:
            raise SaveFailed(
                "the run can't be read", where=self._run, seen=str(error),
                todo="check the disk and the limit of open files; the next snapshot is tried all the same",
            ) from error  # fmt: skip
        self._seen = series.entries
        sequence = max(series.next_sequence, self._next_sequence)
        return position_after(series, descriptor, sequence, run_id=self.run_id)

    def take_notes(self) -> list[str]:
        """None: there is no shared memory."""
        return []

    def memories(self) -> list[memoryview]:
        """None that is worth arranging for: it is copied to and written in one go."""
        return []

    def interrupts_copy(self) -> bool:
        """Nothing is copied beside the training."""
        return False

    def finish_copy(self) -> None:
        """Nothing is copied beside the training."""

    def skipped(self, ticket: Ticket) -> None:
        """Nobody to tell."""

    # --- there is no daemon to wait for or to ask ------------------------------------------------

    def look(self) -> None:
        """Nothing arrives."""

    def wait_for(self, ticket: Ticket, state: str, timeout_s: float) -> None:
        """Nothing to wait for: raises when `state` can only be reached with a daemon."""
        if not ticket.has_reached(state) and not ticket.cannot_reach(state):
            raise CkptdError(
                "nobody verifies",
                where=f"step {ticket.step}",
                seen='daemon="off"',
                todo="use ckptd.verify(ticket.path)",
            )

    def was_told(self, ticket: Ticket) -> None:
        self._failures.was_told(ticket.snapshot)

    def wait_all(self, timeout_s: float, *, no_daemon_s: float | None = None) -> None:
        """Nothing to wait for."""

    def drain(self, timeout_s: float, *, verified: bool = False) -> int:
        """Nothing to wait for."""
        return 0

    def await_earlier(self, timeout_s: float, slots: EarlierSlots | None = None) -> int:
        """Nothing to wait for: what lay in slots was written when this was opened."""
        return 0

    def inherit(self, accepted: Accepted) -> None:
        """Nothing is restored from a slot here: what was left in one is on disk before anything else."""

    def waiting(self) -> None:
        """Nobody says."""

    def slot_dir(self) -> Path:
        """Where slots lie."""
        return self._root.slot_path

    def status(self) -> dict[str, Any]:
        """As the daemon's, with nothing in it but that there is none."""
        return {"schema": "ckpt.v2-status", "daemon": None, "runs": [], "verifier": None}

    def close(self, timeout_s: float) -> None:
        """Give the lock and the memory back."""
        self._root_lock.release()
        self._unmap()

    def abandon(self) -> None:
        """In a forked child all of this is the parent's (RootLock lets go of its descriptor by itself)."""
        self.lock = threading.RLock()

    def _unmap(self) -> None:
        if self._buffer is not None:
            with contextlib.suppress(BufferError):  # somebody's view of it still lives; it goes with that
                self._buffer.close()
            self._buffer = None

    def _write_left(self) -> None:
        """What earlier clients left in shared memory; no sequence that a snapshot there has is given again."""
        given = [header.sequence + 1 for header in sealed_headers(self._root)]
        self._next_sequence = max([self._next_sequence, *given])
        adopt_left(
            self._root,
            self._run,
            self.run_id,
            self._next_sequence,
            lambda why: warn(f"run {self._run}: {why}"),
        )


def _refuse_unread(series: Series) -> None:
    """A run that seems to have no birth because it can't be read now must get no second one."""
    said = [f"{e.name}: {e.reason}" for e in series.entries if e.is_in_doubt]
    if series.decisions.errors or said:
        said += [f"{name}: {reason}" for name, reason in series.decisions.unreadable]
        raise ReadFailed("whose run it is can't be told now", where=str(series.run_dir), seen=said[0])


def _forget_frames(error: BaseException) -> None:
    """An error that a ticket keeps must not keep the whole state alive through the frames it passed."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
