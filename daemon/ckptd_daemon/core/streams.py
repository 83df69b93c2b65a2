"""Snapshots that come in over a stream: begun, received piece by piece under credit, accepted once they are whole.

What arrives is checked and hashed in a thread of its own. A snapshot becomes one of the daemon's only when all of
it is here and hashed right: until then it has no sequence, and its client keeps it. Anything about a stream may be
said twice.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptd.errors import CkptdError, NoDaemon, ProtocolError
from ckptd.link import wire
from ckptd.snapshot.slots import Slot, SlotHeader, needed_bytes, streamed_bytes
from ckptd_daemon.core import credit
from ckptd_daemon.core.credit import Account
from ckptd_daemon.core.incoming import Incoming
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.sessions import Session, Sessions
from ckptd_daemon.core.staged_bytes import StagedBytes
from ckptd_daemon.core.stream_buffers import StreamBuffers
from ckptd_daemon.core.worker import Worker

log = logging.getLogger(__name__)

#: Sends to a stream's connection; False when that is gone.
Send = Callable[[bytes, wire.Reply], bool]


@dataclass(eq=False)
class Stream:
    """The snapshot that one client streams now.

    Attributes:
        identity: The connection it comes by.
        begin: What was said of it.
        incoming: Its memory; None while there is none for it.
        resuming: How many Begins aren't answered yet; nothing is taken meanwhile.
    """

    session: Session
    identity: bytes
    begin: wire.StreamBegin
    incoming: Incoming | None = None
    resuming: int = 0
    account: Account = field(default_factory=Account)

    @property
    def key(self) -> tuple[int, int, int, int]:
        begin = self.begin
        return begin.snapshot, begin.generation, begin.data_bytes, begin.descriptor_bytes


class Streams:
    """All clients' streams, at most one each. Of the loop's thread.

    Args:
        sessions: Who is attached.
        worker: The thread that hashes.
        maker: The thread that makes memory.
        send: Sends a message to a stream's connection, without waiting.
        now: A monotonic clock in seconds.
        staged: Counts the memory of clients.

    Attributes:
        pipeline: Where whole snapshots go; set once, right after construction.
        endpoint: Where clients stream to, told when they attach.
        endpoint_tcp: The same for those connected by TCP; "" for none.
        buffers: The memory.
    """

    pipeline: Pipeline

    def __init__(
        self, sessions: Sessions, worker: Worker, maker: Worker, send: Send, now: Callable[[], float],
        staged: StagedBytes,
    ) -> None:  # fmt: skip
        self.endpoint = self.endpoint_tcp = ""
        self.buffers = StreamBuffers(maker, staged, self._ready)
        self._sessions, self._worker, self._send, self._now = sessions, worker, send, now
        self._streams: dict[str, Stream] = {}

    # --- messages --------------------------------------------------------------------------------

    def handle(self, identity: bytes, data: bytes, piece: memoryview | None, *, leaving: bool) -> None:
        """Answer one message. Whatever it holds, nothing is raised and nobody else is harmed."""
        message_id = 0
        try:
            request = wire.decode_stream(data)
            message_id = request.id
            if isinstance(request, wire.StreamBegin) and piece is None:
                self.begin(identity, request, leaving=leaving)
            elif isinstance(request, wire.StreamFrame) and piece is not None and not leaving:
                self.frame(identity, request, piece)
            else:
                raise (
                    NoDaemon("the daemon is leaving")
                    if leaving
                    else ProtocolError("bytes missing, or too many")
                )
        except CkptdError as error:
            self._refuse(identity, message_id, error)
        except Exception as error:
            log.exception("daemon.fault")
            self._refuse(identity, message_id, CkptdError("a fault of the daemon", seen=repr(error)))

    def begin(self, identity: bytes, request: wire.StreamBegin, *, leaving: bool) -> None:
        """Begin a stream, or go on with it. Raises the error to refuse it with."""
        session = self._sessions.get(request.client_id)
        if session is None or not hmac.compare_digest(session.stream_token, request.token):
            raise ProtocolError("not attached", where=f"client {request.client_id}", todo="attach first")
        session.streams = True
        known = self.pipeline.find(session.run, session.client_id, request.snapshot)
        if known is not None:
            self._drop(session.client_id)
            reply = wire.Accepted(id=request.id, snapshot=known.number, sequence=known.sequence)
            self._send(identity, reply)
            return
        if leaving:
            raise NoDaemon("the daemon is leaving", todo="stream it to the next one")
        stream = self._streams.get(session.client_id)
        if stream is None or stream.key != Stream(session, identity, request).key:
            self._drop(session.client_id)
            stream = self._streams[session.client_id] = Stream(session, identity, request)
        stream.identity, stream.begin = identity, request
        self._answer_begin(stream)

    def frame(self, identity: bytes, request: wire.StreamFrame, piece: memoryview) -> None:
        """Have one piece taken in. Raises the error to refuse it with; the stream stays as it was."""
        stream = next((one for one in self._streams.values() if one.identity == identity), None)
        incoming = stream.incoming if stream is not None else None
        if stream is None or incoming is None or stream.key[:2] != (request.snapshot, request.generation):
            raise ProtocolError("no such stream", seen=f"snapshot {request.snapshot}", todo="begin it first")
        beyond = request.offset + piece.nbytes > stream.account.upto
        if request.offset != stream.account.arrived or beyond or stream.resuming:
            raise ProtocolError(
                "not the piece that comes next, or more than was granted", where=incoming.slot.name,
                seen=f"{piece.nbytes} bytes at {request.offset}",
                wanted=f"at {stream.account.arrived}, up to {stream.account.upto}",
            )  # fmt: skip
        stream.account.arrived += piece.nbytes
        stream.account.active_at = self._now()
        self._worker.submit(
            lambda: incoming.take(request.offset, request.sha256, piece),
            lambda result: self._took(stream, incoming, request.id, result),
        )

    def look(self) -> None:
        """From time to time: credit that isn't used goes to those who have none."""
        for stream in self._of(credit.revoke(self._accounts(), self._now())):
            self._tell(stream, 0)
        self._grant()

    # --- going -----------------------------------------------------------------------------------

    def forget(self, session: Session) -> None:
        """The client is gone: what it has streamed half is given up, what is accepted is written."""
        self._drop(session.client_id)
        self.buffers.forget(session.client_id)

    def any_waited_for(self) -> bool:
        """Whether a client waits for what it streams."""
        return any(one.begin.snapshot <= one.session.waits_for for one in self._streams.values())

    def owns(self, slot: Slot) -> bool:
        """Whether this is memory for streams."""
        return self.buffers.owns(slot)

    def freed(self, slot: Slot) -> None:
        """A streamed snapshot was written or given up."""
        self.buffers.freed(slot)

    def describe(self, client_id: str) -> dict[str, Any] | None:
        """The stream of one client, for its status; None when there is none."""
        stream = self._streams.get(client_id)
        if stream is None:
            return None
        total = streamed_bytes(stream.begin.data_bytes, stream.begin.descriptor_bytes)
        have = stream.incoming.have if stream.incoming is not None else 0
        return {"snapshot": stream.begin.snapshot, "have": have, "bytes": total}

    # --- inside ----------------------------------------------------------------------------------

    def _answer_begin(self, stream: Stream) -> None:
        incoming = stream.incoming
        if incoming is None:
            self._receive_in_memory(stream)
        if stream.incoming is None:
            self._tell(stream, stream.begin.id)  # nothing yet, and no credit
        else:
            # What arrived before this is taken in, or refused, before it is answered and before anything more is
            # taken: what waits in memory stays within the credit, however often somebody begins anew.
            taken, number = stream.incoming, stream.begin.id
            stream.resuming += 1
            self._worker.submit(lambda: taken.have, lambda _: self._resume(stream, taken, number))

    def _receive_in_memory(self, stream: Stream) -> None:
        begin, session = stream.begin, stream.session
        size = needed_bytes(begin.data_bytes, begin.descriptor_bytes)
        slot = self.buffers.take(session.client_id, session.run, size, begin.slots)
        if slot is not None:
            slot.begin(session.client_id, session.run, begin.snapshot)
            stream.incoming = Incoming(slot, begin.data_bytes, begin.descriptor_bytes)
            stream.account.total = stream.incoming.total

    def _resume(self, stream: Stream, incoming: Incoming, message_id: int) -> None:
        if not self._is_current(stream, incoming):
            return
        stream.account.arrived = stream.account.have = incoming.have
        stream.resuming -= 1
        stream.account.upto = max(stream.account.upto, incoming.have)
        self._grant(but=stream)
        self._tell(stream, message_id)

    def _ready(self, client_id: str, error: CkptdError | None) -> None:
        stream = self._streams.get(client_id)
        if stream is None or stream.incoming is not None:
            return
        if error is not None:
            del self._streams[client_id]
            self._refuse(stream.identity, stream.begin.id, error)
            return
        self._receive_in_memory(stream)
        self._grant()

    def _took(
        self, stream: Stream, incoming: Incoming, message_id: int, result: SlotHeader | Exception | None
    ) -> None:
        if not self._is_current(stream, incoming):
            return
        stream.account.have = incoming.have
        if isinstance(result, Exception):
            error = result if isinstance(result, CkptdError) else ProtocolError("refused", seen=str(result))
            self._refuse(stream.identity, message_id, error)
        elif result is not None:
            self._accept(stream, incoming.slot, result, message_id)
        else:
            self._grant(but=stream)
            self._tell(stream, message_id)

    def _accept(self, stream: Stream, slot: Slot, header: SlotHeader, message_id: int) -> None:
        del self._streams[stream.session.client_id]
        snapshot = self.pipeline.accept(slot, header)
        if snapshot.slot is not slot:  # it has come by another way meanwhile
            slot.release()
            self.buffers.freed(slot)
        reply = wire.Accepted(id=message_id, snapshot=snapshot.number, sequence=snapshot.sequence)
        self._send(stream.identity, reply)
        self._grant()

    def _grant(self, but: Stream | None = None) -> None:
        """Grant what can be granted, and tell it; not to `but`, who is told anyway."""
        for stream in self._of(credit.grant(self._accounts(), self._now())):
            if stream is not but:
                self._tell(stream, 0)

    def _tell(self, stream: Stream, message_id: int) -> None:
        account, begin = stream.account, stream.begin
        state = wire.StreamState(
            id=message_id, snapshot=begin.snapshot, generation=begin.generation,
            have=account.have, upto=account.upto,
        )  # fmt: skip
        self._send(stream.identity, state)

    def _drop(self, client_id: str) -> None:
        stream = self._streams.pop(client_id, None)
        if stream is not None and stream.incoming is not None:
            # The thread may still have pieces of it: only after those is its memory anybody else's.
            slot = stream.incoming.slot
            self._worker.submit(slot.release, lambda _: self.buffers.freed(slot))

    def _refuse(self, identity: bytes, message_id: int, error: CkptdError) -> None:
        log.info("stream.refused kind=%s error=%s", type(error).__name__, error)
        self._send(identity, wire.Refused(id=message_id, error=wire.WireError.of(error)))

    def _is_current(self, stream: Stream, incoming: Incoming) -> bool:
        return self._streams.get(stream.session.client_id) is stream and stream.incoming is incoming

    def _accounts(self) -> list[Account]:
        return [stream.account for stream in self._streams.values()]

    def _of(self, accounts: list[Account]) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.account in accounts]
