"""The messages between client and daemon: typed, versioned, decoded under limits (msgspec, MessagePack).

One DEALER per client, one ROUTER in the daemon, one frame per message. Every request has an `id` which
its reply echoes, and may be sent twice: handling is idempotent. `Notice` with id 0 comes unasked.

Snapshots that are streamed take a second pair of sockets: a StreamBegin, then one message for each piece of
the slot, a StreamFrame and the raw bytes behind it. The daemon says how far the client may go (StreamState).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ckptd import errors
from ckptd.errors import CkptdError, ProtocolError
from ckptd.limits import (
    MAX_DESCRIPTOR_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    MAX_SKIPPED,
    MAX_SKIPPED_TOLD,
)

PROTOCOL = 1

Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=128)]
ClientId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Text = Annotated[str, Meta(max_length=16_384)]
Count = Annotated[int, Meta(ge=0, le=2**62)]


class Message(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    id: Id


# --- requests -------------------------------------------------------------------------------------


class Attach(Message):
    """A client introduces itself; again after the daemon restarted. One live client per run."""

    protocol: int
    run: Name
    client_id: ClientId
    pid: Count
    pid_started: Count  #: field 22 of /proc/PID/stat, clock ticks since boot
    version: Name


class Reserve(Message):
    """Have `slots` slots of at least `slot_bytes` (header, data and descriptor). Slots too small are replaced when free.

    None at all (0): the client streams from now on, its free slots are removed.
    """

    client_id: ClientId
    slot_bytes: Count
    slots: Annotated[int, Meta(ge=0, le=2)]


class Push(Message):
    """A sealed slot. Answered by Accepted, then by Notices as its state changes."""

    client_id: ClientId
    slot: Name
    generation: Count
    snapshot: Count


class Supersede(Message):
    """This snapshot gives its slot up for a newer one of the same client, unless it is being written already.

    Answered at once: by a Notice with its state, "superseded" when the slot is free; by Done when the daemon knows no
    such snapshot, which may be a stream that it takes in just now.
    """

    client_id: ClientId
    snapshot: Count
    step: Count  #: its step: the daemon reads it only when it writes
    until: float  #: not later: CLOCK_MONOTONIC of the machine, on which both are


class Skipped(Message):
    """Snapshots of which the daemon has seen nothing, because they were never taken. Answered by Done."""

    client_id: ClientId
    #: how many this client has skipped so far, those told before included
    count: Annotated[int, Meta(ge=0, le=MAX_SKIPPED)]
    #: of the newest, those told before left out
    steps: Annotated[list[Count], Meta(max_length=MAX_SKIPPED_TOLD)]
    #: they were taken, and gave way to newer ones before they were sent; counted apart
    gave_way: bool = False


class Hurry(Message):
    """The trainer waits for its snapshots up to this one: they are written at normal priority. Answered by Done."""

    client_id: ClientId
    snapshot: Count
    verified: bool = False  #: it waits until this one is verified: that is done at normal priority too


class Resolve(Message):
    """What became of this snapshot? Answered by a Notice (state "unknown" if never heard of)."""

    client_id: ClientId
    snapshot: Count


class Waiting(Message):
    """Answered by WaitingReply: which snapshots of a run were accepted and aren't written yet."""

    run: Name


class Drain(Message):
    """Answered by Drained once every accepted snapshot (of run, or of all when None) is committed or failed, and, if
    asked, verified. Snapshots accepted later are not waited for."""

    run: Name | None
    verified: bool = False


class Status(Message):
    """Answered by StatusReply."""


class Detach(Message):
    """The client leaves; its free slots are removed. Answered by Done."""

    client_id: ClientId


class Stop(Message):
    """Drain, then leave. Answered by Done at once; the process is gone when its lock is free."""

    grace_s: float


Request = (
    Attach | Reserve | Push | Supersede | Skipped | Hurry | Resolve | Drain | Waiting | Status | Detach | Stop
)


class StreamBegin(Message):
    """A sealed snapshot that lies with the client is about to be streamed, or to go on being so.

    Answered by StreamState, or by Accepted when the daemon has it already. What is streamed is the slot's region
    from its data on: the data, padding up to a whole page, the descriptor.
    """

    client_id: ClientId
    token: Name  #: as Attached said: who streams is who is attached
    snapshot: Count
    generation: Count
    data_bytes: Count
    descriptor_bytes: Annotated[int, Meta(ge=1, le=MAX_DESCRIPTOR_BYTES)]
    slots: Annotated[int, Meta(ge=1, le=2)]  #: how many of its snapshots may lie with the daemon at once


class StreamFrame(Message):
    """What is said of the raw bytes that follow in the same message. Answered by StreamState, at last by Accepted."""

    snapshot: Count
    generation: Count
    offset: Count
    sha256: Annotated[
        bytes, Meta(min_length=32, max_length=32)
    ]  #: of everything from 0 to the end of this frame


StreamRequest = StreamBegin | StreamFrame


# --- replies and notices --------------------------------------------------------------------------


class SlotInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name  #: file name inside Attached.slot_dir
    bytes: Count


class Attached(Message):
    daemon_id: Name  #: fresh for every daemon process
    run_id: Name
    slot_dir: Text
    slots: list[SlotInfo]
    pending: Count  #: snapshots of this run, of earlier clients, still to be committed
    lost: Count = 0  #: such snapshots that could not be written, newer than the newest that was
    stream: Text = ""  #: endpoint for streamed snapshots
    stream_tcp: Text = ""  #: the same for those who are connected by TCP; "" when the daemon has none
    stream_token: Name = ""


class Reserved(Message):
    slots: list[SlotInfo]


class Accepted(Message):
    snapshot: Count
    sequence: Count


class Notice(Message):
    """The state of one snapshot: staged, writing, committed, verified, corrupt, failed, superseded or unknown.

    `slot_free` says that the slot named `slot` may be filled again.
    """

    client_id: ClientId
    snapshot: Count
    step: Count
    state: Name
    sequence: Count = 0
    name: Name = ""  #: folder name, once committed
    slot: Name = ""
    slot_free: bool = False
    error: WireError | None = None


class StreamState(Message):
    """How much of a streamed snapshot is here, and how far its client may send: nothing beyond `upto`."""

    snapshot: Count
    generation: Count
    have: Count
    upto: Count


class WaitingSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    client_id: ClientId
    snapshot: Count
    sequence: Count
    slot: Name = ""  #: file name inside Attached.slot_dir; "" when it lies in no file


class WaitingReply(Message):
    snapshots: list[WaitingSnapshot]  #: by sequence


class Drained(Message):
    failed: Count  #: how many of those waited for failed


class StatusReply(Message):
    data: dict[str, Any]  #: the JSON of `ckptd status --json`


class Done(Message):
    pass


class WireError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Name
    what: Text
    where: Text = ""
    seen: Text = ""
    wanted: Text = ""
    todo: Text = ""

    @classmethod
    def of(cls, error: CkptdError) -> WireError:
        cut = 16_000
        return cls(
            kind=type(error).__name__ if type(error).__name__ in errors.BY_NAME else "CkptdError",
            what=error.what[:cut], where=error.where[:cut], seen=error.seen[:cut],
            wanted=error.wanted[:cut], todo=error.todo[:cut],
        )  # fmt: skip

    def exception(self) -> CkptdError:
        cls = errors.BY_NAME.get(self.kind, CkptdError)
        return cls(self.what, where=self.where, seen=self.seen, wanted=self.wanted, todo=self.todo)


class Refused(Message):
    error: WireError


Reply = (
    Attached
    | Reserved
    | Accepted
    | Notice
    | StreamState
    | Drained
    | WaitingReply
    | StatusReply
    | Done
    | Refused
)

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_streams = msgspec.msgpack.Decoder(StreamRequest)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | StreamRequest | Reply) -> bytes:
    return _encode(message)


def decode_request(data: bytes) -> Request:
    """Raises ProtocolError for anything that isn't a request of this protocol."""
    request: Request = _decode(_requests, data, MAX_REQUEST_BYTES)
    return request


def decode_stream(data: bytes) -> StreamRequest:
    """Raises ProtocolError for anything that isn't a request about a stream."""
    request: StreamRequest = _decode(_streams, data)
    return request


def decode_reply(data: bytes) -> Reply:
    """Raises ProtocolError for anything that isn't a reply of this protocol."""
    reply: Reply = _decode(_replies, data)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, most: int = MAX_MESSAGE_BYTES) -> Any:
    if len(data) > most:
        raise ProtocolError("message too long", seen=f"{len(data)} bytes", wanted=f"at most {most}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("not a message of this protocol", seen=str(error)[:200]) from error
