"""What the daemon answers to each message."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

from ckptd.errors import CkptdError, InvalidArgument, NoDaemon, ProtocolError
from ckptd.limits import MAX_BASES, MAX_CLIENTS
from ckptd.link import wire
from ckptd.names import check_run_name
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.lookup import Lookup
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.sessions import Session
from ckptd_daemon.core.slotpool import SlotPool, holds_snapshot
from ckptd_daemon.core.snapshots import Snapshot

log = logging.getLogger(__name__)

#: Requests to drain of one connection that may wait at the same time: a client has one thing to wait for.
MAX_WAITING_DRAINS: Final = 8
#: The same of all: who has gone is only noticed when it is answered.
MAX_WAITING_DRAINS_ALL: Final = MAX_WAITING_DRAINS * MAX_CLIENTS
MOST_GRACE_S: Final = 7 * 24 * 3600.0

#: Sends to a connection; False when that is gone.
Send = Callable[[bytes, wire.Reply], bool]


class Service:
    """The daemon's answers. Of the loop's thread only; every method returns at once.

    Args:
        clients: Who is attached.
        pipeline: The snapshots.
        pool: The slots.
        lookup: Asks the disk about snapshots that aren't remembered.
        send: Sends a message to a connection, without waiting.
        status: Makes the answer to Status.

    Attributes:
        stop_asked_s: The grace of a Stop that came in, in seconds.
    """

    def __init__(
        self, *, clients: Clients, pipeline: Pipeline, pool: SlotPool, lookup: Lookup, send: Send,
        status: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.clients, self.pipeline, self.pool = clients, pipeline, pool
        self.stop_asked_s: float | None = None
        self._lookup, self._send, self._status = lookup, send, status

    def handle(self, identity: bytes, data: bytes) -> None:
        """Answer one message. Whatever it holds, nothing is raised and nobody else is harmed."""
        message_id = 0
        try:
            request = wire.decode_request(data)
            message_id = request.id
            self._dispatch(identity, request)
        except CkptdError as error:
            self._refuse(identity, message_id, error)
        except Exception as error:
            log.exception("daemon.fault")
            self._refuse(identity, message_id, CkptdError("a fault of the daemon", seen=repr(error)))

    def _dispatch(self, identity: bytes, request: wire.Request) -> None:
        match request:
            case wire.Attach():
                self.clients.attach(identity, request)
            case wire.Reserve():
                self.clients.reserve(self._session(identity, request.client_id), identity, request)
            case wire.Push():
                self._push(self._session(identity, request.client_id), identity, request)
            case wire.Supersede():
                self._supersede(self._session(identity, request.client_id), identity, request)
            case wire.Skipped():
                self.clients.skipped(self._session(identity, request.client_id), request)
                self._send(identity, wire.Done(id=request.id))
            case wire.Hurry():
                self._session(identity, request.client_id).hurry(request.snapshot, verified=request.verified)
                self._send(identity, wire.Done(id=request.id))
            case wire.Resolve():
                self._resolve(identity, request)
            case wire.Drain():
                self._drain(identity, request)
            case wire.Waiting():
                self._send(identity, wire.WaitingReply(id=request.id, snapshots=self._waiting(request.run)))
            case wire.Status():
                self._send(identity, wire.StatusReply(id=request.id, data=self._status()))
            case wire.Detach():
                self.clients.bury(self._session(identity, request.client_id))
                self._send(identity, wire.Done(id=request.id))
            case wire.Stop():
                grace_s = request.grace_s if math.isfinite(request.grace_s) else MOST_GRACE_S
                self.stop_asked_s = min(max(0.0, grace_s), MOST_GRACE_S)
                self._send(identity, wire.Done(id=request.id))

    def _session(self, identity: bytes, client_id: str) -> Session:
        session = self.clients.sessions.get(client_id)
        if session is None or session.identity != identity:
            raise ProtocolError("not attached", where=f"client {client_id}", todo="attach first")
        return session

    def _push(self, session: Session, identity: bytes, request: wire.Push) -> None:
        known = self.pipeline.find(session.run, session.client_id, request.snapshot)
        if known is not None:
            self._accepted(identity, request, known)
            return
        if self.clients.closed:
            raise NoDaemon("the daemon is leaving", todo="push it to the next one: the slot is kept")
        slot = self.pool.get(session.client_id, request.slot)
        header = None if slot is None else slot.header()
        pushed = (request.generation, request.snapshot, session.run, session.client_id)
        if (
            slot is not None
            and header is not None
            and holds_snapshot(header)
            and (header.generation, header.snapshot, header.run, header.client_id) == pushed
        ):
            self._accepted(identity, request, self.pipeline.accept(slot, header))
            return
        # In no slot: committed before a crash, or a mistake.
        self._lookup.ask(
            session.run, session.client_id, request.snapshot,
            lambda found: self._pushed_late(identity, request, found), owner=identity,
        )  # fmt: skip

    def _pushed_late(self, identity: bytes, request: wire.Push, found: Snapshot | None) -> None:
        if found is not None:
            self._accepted(identity, request, found)
            return
        seen = f"snapshot {request.snapshot}, generation {request.generation}"
        error = ProtocolError(
            "the slot doesn't hold that snapshot", where=request.slot, seen=seen, todo="take it again"
        )
        self._refuse(identity, request.id, error)

    def _accepted(self, identity: bytes, request: wire.Push, snapshot: Snapshot) -> None:
        reply = wire.Accepted(id=request.id, snapshot=snapshot.number, sequence=snapshot.sequence)
        self._send(identity, reply)
        if snapshot.state is not State.STAGED:
            self._send(identity, snapshot.notice(0))

    def _supersede(self, session: Session, identity: bytes, request: wire.Supersede) -> None:
        known = self.pipeline.find(session.run, session.client_id, request.snapshot)
        if known is None:  # a stream not taken in yet, or written long ago: the disk may be long in telling
            self._send(identity, wire.Done(id=request.id))
            return
        self.pipeline.give_way(known, request.step, until=request.until)
        self._send(identity, known.notice(request.id))

    def _resolve(self, identity: bytes, request: wire.Resolve) -> None:
        def answer(found: Snapshot | None) -> None:
            unheard = wire.Notice(
                id=request.id, client_id=request.client_id, snapshot=request.snapshot, step=0, state="unknown"
            )
            self._send(identity, unheard if found is None else found.notice(request.id))

        session = self.clients.sessions.get(request.client_id)
        runs = [session.run] if session is not None else list(self.pipeline.books)
        self._lookup.resolve(runs, request.client_id, request.snapshot, answer, owner=identity)

    def _waiting(self, run: str) -> list[wire.WaitingSnapshot]:
        """The newest of those accepted and not written, one more than a client has a use for."""
        waiting = sorted(self.pipeline.unwritten(check_run_name(run)), key=lambda one: one.sequence)
        return [
            wire.WaitingSnapshot(
                client_id=one.client_id, snapshot=one.number, sequence=one.sequence,
                slot=one.slot.name if one.slot is not None and one.slot in self.pool else "",
            )
            for one in waiting[-MAX_BASES - 1 :]
        ]  # fmt: skip

    def _drain(self, identity: bytes, request: wire.Drain) -> None:
        if request.run is not None:
            check_run_name(request.run)
        waiting = self.pipeline.waiting
        if waiting(identity) >= MAX_WAITING_DRAINS or waiting() >= MAX_WAITING_DRAINS_ALL:
            raise InvalidArgument(
                "too many requests to drain", wanted=f"at most {MAX_WAITING_DRAINS} at once"
            )
        self.pipeline.when_settled(
            request.run,
            verified=request.verified,
            owner=identity,
            reply=lambda failed: self._send(identity, wire.Drained(id=request.id, failed=failed)),
        )

    def _refuse(self, identity: bytes, message_id: int, error: CkptdError) -> None:
        log.info("request.refused kind=%s error=%s", type(error).__name__, error)
        self._send(identity, wire.Refused(id=message_id, error=wire.WireError.of(error)))
