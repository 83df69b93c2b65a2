"""The messages between client and daemon: typed, versioned, decoded under limits (msgspec, MessagePack).

One DEALER per client, one ROUTER in the daemon, one frame per message. Every request has an `id` which
its reply echoes, and may be sent twice: handling is idempotent. `Notice` with id 0 comes unasked.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ckptd import errors
from ckptd.errors import CkptdError, ProtocolError
from ckptd.limits import MAX_MESSAGE_BYTES

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
    """Have `slots` slots of at least `slot_bytes` (header, data and descriptor). Slots too small are replaced when free."""

    client_id: ClientId
    slot_bytes: Count
    slots: Annotated[int, Meta(ge=1, le=2)]


class Push(Message):
    """A sealed slot. Answered by Accepted, then by Notices as its state changes."""

    client_id: ClientId
    slot: Name
    generation: Count
    snapshot: Count


class Resolve(Message):
    """What became of this snapshot? Answered by a Notice (state "unknown" if never heard of)."""

    client_id: ClientId
    snapshot: Count


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


Request = Attach | Reserve | Push | Resolve | Drain | Status | Detach | Stop


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


Reply = Attached | Reserved | Accepted | Notice | Drained | StatusReply | Done | Refused

_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return _encode(message)


def decode_request(data: bytes) -> Request:
    """Raises ProtocolError for anything that isn't a request of this protocol."""
    request: Request = _decode(_requests, data)
    return request


def decode_reply(data: bytes) -> Reply:
    """Raises ProtocolError for anything that isn't a reply of this protocol."""
    reply: Reply = _decode(_replies, data)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            "message too long", seen=f"{len(data)} bytes", wanted=f"at most {MAX_MESSAGE_BYTES}"
        )
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("not a message of this protocol", seen=str(error)[:200]) from error
