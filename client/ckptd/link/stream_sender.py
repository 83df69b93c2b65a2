"""The thread that streams staged snapshots to the daemon while training goes on.

It has a connection of its own, and nothing of it blocks the training thread. It ends with the client; a forked
child has none. A snapshot stays in its slot until the daemon has made it durable, so that one that was lost with a
daemon, or half sent, is sent again to the next.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

import zmq

from ckptd.disk.rootdir import Root
from ckptd.errors import CkptdError, NoDaemon, ProtocolError, TimedOut
from ckptd.link import wire
from ckptd.link.connection import Connection
from ckptd.link.outgoing import Outgoing
from ckptd.link.stream_job import PAUSE_S, Failed, Job, Place
from ckptd.link.wire import Accepted, Refused, StreamState
from ckptd.snapshot.slots import Slot

__all__ = ["StreamSender"]

log = logging.getLogger(__name__)

_SLICE_S: Final = 0.02  # how long one look at the socket waits, and so how late an order is obeyed
_CONNECT_S: Final = 0.3
_ASK_AGAIN_S: Final = 2.0  # without a word of the daemon: an answer may have been lost
_CONNECT_AGAIN_S: Final = 6.0  # the connection may have been lost
_PAUSE_MOST_S: Final = 2.0
_MOST_REFUSALS: Final = 5  # in a row, with nothing taken in between
_LET_GO_S: Final = 1.0
_JOIN_S: Final = 2.0


class StreamSender:
    """Streams one snapshot after the other, in the order of their numbers. Its methods return at once, but for close().

    Args:
        root: The root.
        client_id: 32 hex digits.
        slots: How many snapshots may lie with the daemon at once.
    """

    def __init__(self, root: Root, client_id: str, slots: int) -> None:
        self._root, self._client_id, self._slots = root, client_id, slots
        self._changed = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._news: deque[Accepted | Failed] = deque()
        self._unheard: set[int] = set()
        self._place: Place | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None  # of the thread
        self._connected_to: Place | None = None

    # --- for the client's thread -----------------------------------------------------------------

    def go_to(self, place: Place, unheard: Iterable[int]) -> None:
        """Stream to this daemon from now on: nothing from the first of `unheard` on, until that is heard of."""
        with self._changed:
            self._place, self._unheard = place, set(unheard)
            self._changed.notify_all()

    def expect(self, snapshot: int) -> None:
        """Begin no later one before this one is heard of: it goes another way, or may have to be sent again first."""
        with self._changed:
            self._unheard.add(snapshot)

    def heard(self, snapshot: int) -> None:
        """The daemon has said what it knows of this one, and where it must be sent again send() was called."""
        with self._changed:
            self._unheard.discard(snapshot)
            self._changed.notify_all()

    def send(self, snapshot: int, generation: int, slot: Slot) -> None:
        """Have a sealed slot streamed; nothing happens when it is being streamed already."""
        with self._changed:
            if snapshot in self._jobs or self._stopping:
                return
            self._jobs[snapshot] = Job(snapshot, generation, slot, Outgoing(slot))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckptd-stream", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def withdraw(self, snapshot: int) -> bool:
        """Send no more of it; False when the daemon may have all of it, and then nothing is changed.

        Its memory is read no more when this returns, which takes a moment, and a second at most.
        """
        with self._changed:
            job = self._jobs.get(snapshot)
            if job is None or job.may_be_there:
                return False
            job.over = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._jobs.get(snapshot) is not job, _LET_GO_S)
            return True

    def forget(self, snapshot: int) -> None:
        """What becomes of it is known: send no more of it."""
        with self._changed:
            if (job := self._jobs.get(snapshot)) is not None:
                job.over = True
                self._changed.notify_all()

    def holds(self, slot: Slot) -> bool:
        """Whether bytes of this slot may still be read here."""
        with self._changed:
            return any(job.slot is slot for job in self._jobs.values())

    def news(self) -> list[Accepted | Failed]:
        """What has happened since the last call."""
        with self._changed:
            news = list(self._news)
            self._news.clear()
            return news

    def close(self) -> None:
        """End the thread: what isn't sent stays unsent. Takes two seconds at most."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_JOIN_S)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                self._work(*work)
        finally:
            self._disconnect()

    def _next(self) -> tuple[Job, Place] | None:
        with self._changed:
            while not self._stopping:
                for over in [job for job in self._jobs.values() if job.over]:
                    self._finish(over)
                first = min(self._jobs.values(), key=lambda job: job.snapshot, default=None)
                if first is not None and self._place is not None and self._may_begin(first):
                    return first, self._place
                self._changed.wait()
        return None

    def _may_begin(self, job: Job) -> bool:
        return all(job.snapshot < unheard for unheard in self._unheard)

    def _work(self, job: Job, place: Place) -> None:
        try:
            self._stream(job, place, self._connected(place))
        except (
            CkptdError,
            OSError,
            zmq.ZMQError,
        ) as error:  # no descriptor is free, for one: it may be over soon
            log.info("stream.interrupted snapshot=%d error=%s", job.snapshot, error)
            self._disconnect()
            with self._changed:
                self._changed.wait_for(lambda: self._is_off(job, place), job.pause_s)
            job.pause_s = min(2 * job.pause_s, _PAUSE_MOST_S)
        if job.over:
            with self._changed:
                self._finish(job)

    def _stream(self, job: Job, place: Place, connection: Connection) -> None:
        """Send a snapshot until the daemon has it, or somebody wants something else."""
        outgoing = job.outgoing
        begun = self._begin(job, place, connection)
        asked_at = heard_at = time.monotonic()
        resumed = False
        while not self._is_off(job, place):
            while resumed and not job.over and self._send_piece(job, connection):
                pass
            for reply in connection.poll(_SLICE_S):
                heard_at = asked_at = time.monotonic()
                if isinstance(reply, StreamState) and reply.snapshot == job.snapshot:
                    if reply.id == begun:
                        outgoing.go_on(reply.have, reply.upto)
                        resumed, job.pause_s = True, PAUSE_S
                    elif resumed:
                        job.refusals = 0 if reply.have > outgoing.have else job.refusals
                        outgoing.granted(reply.have, reply.upto)
                elif isinstance(reply, Accepted) and reply.snapshot == job.snapshot:
                    self._done(job, reply)
                    return
                elif isinstance(reply, Refused) and (resumed or reply.id == begun):
                    resumed = False
                    self._refused(job, reply, at_begin=reply.id == begun)
                    if job.over:
                        return
                    begun = self._begin(job, place, connection)
            now = time.monotonic()
            if now - heard_at > _CONNECT_AGAIN_S:
                raise TimedOut("the daemon says nothing about a stream")
            if now - asked_at > _ASK_AGAIN_S:
                asked_at, resumed = now, False
                begun = self._begin(job, place, connection)

    def _begin(self, job: Job, place: Place, connection: Connection) -> int:
        outgoing = job.outgoing
        return connection.send(
            wire.StreamBegin(
                id=0, client_id=self._client_id, token=place.attached.stream_token, snapshot=job.snapshot,
                generation=job.generation, data_bytes=outgoing.data_bytes,
                descriptor_bytes=outgoing.descriptor_bytes, slots=self._slots,
            )
        )  # fmt: skip

    def _send_piece(self, job: Job, connection: Connection) -> bool:
        outgoing = job.outgoing
        if outgoing.next_is_last and not self._may_send_last(job):
            return False
        piece = outgoing.next_piece()
        if piece is None:
            return False
        start, sha256, data = piece
        connection.send(
            wire.StreamFrame(
                id=0, snapshot=job.snapshot, generation=job.generation, offset=start, sha256=sha256
            ),
            data,
        )
        return True

    def _may_send_last(self, job: Job) -> bool:
        with self._changed:
            job.may_be_there = not job.over
            return job.may_be_there

    def _refused(self, job: Job, reply: Refused, *, at_begin: bool) -> None:
        """Go on after a refusal where that makes sense. Raises the error when another connection may do better."""
        error = reply.error.exception()
        if isinstance(error, (NoDaemon, ProtocolError)) and at_begin:
            raise error  # it is leaving, or doesn't know us yet
        job.refusals += 1
        if not isinstance(error, ProtocolError) or job.refusals > _MOST_REFUSALS:
            self._done(job, Failed(job.snapshot, error))

    def _done(self, job: Job, news: Accepted | Failed) -> None:
        with self._changed:
            self._news.append(news)
            job.over = job.over or isinstance(news, Failed)
            self._finish(job)

    def _finish(self, job: Job) -> None:
        if self._jobs.get(job.snapshot) is job:
            del self._jobs[job.snapshot]
            self._changed.notify_all()

    def _is_off(self, job: Job, place: Place) -> bool:
        return job.over or self._stopping or self._place is not place

    def _connected(self, place: Place) -> Connection:
        if self._connection is None or self._connected_to is not place:
            self._disconnect()
            self._connection = Connection(self._root, place.record, place.route())
            self._connected_to = place
            self._connection.wait_ready(_CONNECT_S)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(CkptdError):
                self._connection.close()
            self._connection = None
