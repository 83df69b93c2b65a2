"""Whether somebody waits for what is being written, or verified: then it isn't done at the lowest priority."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ckptd.limits import LARGE_FROM_BYTES
from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.sessions import Session
from ckptd_daemon.core.snapshots import Snapshot

_LONG_S: Final = 0.1


def somebody_waits(clients: Clients) -> bool:
    """A trainer waits for a snapshot or for slots, or whoever asked for a drain, or for the daemon to leave.

    Who asks for that may give it little time.
    """
    return (
        bool(clients.leaving)
        or clients.pipeline.waiting() > 0
        or clients.anybody_reserves()
        or clients.streams.any_waited_for()
        or any(_is_waited_for(snapshot, clients) for snapshot in clients.pipeline.unwritten())
    )


def proof_is_waited_for(clients: Clients) -> bool:
    """A trainer waits for a snapshot to be verified, or whoever drains so far, or a write for the room it brings."""
    return (
        clients.pipeline.proof_is_waited_for()
        or any(_waits_for_proof(session, clients) for session in clients.sessions)
        or any(
            snapshot.waits_for_room and _is_waited_for(snapshot, clients)
            for snapshot in clients.pipeline.unwritten()
        )
    )


class Writes:
    """Whether checkpoints are being written that others give way to: a small one, once it takes long.

    Args:
        pipeline: Whose snapshots.
        now: A monotonic clock in seconds.
    """

    def __init__(self, pipeline: Pipeline, now: Callable[[], float] = time.monotonic) -> None:
        self._pipeline, self._now = pipeline, now
        self._since: float | None = None

    def under_way(self) -> bool:
        """Call again and again: what takes long is known by that."""
        if not self._pipeline.busy():
            self._since = None
            return False
        self._since = self._now() if self._since is None else self._since
        slots = [snapshot.slot for snapshot in self._pipeline.unwritten()]
        large = any(slot is not None and slot.capacity >= LARGE_FROM_BYTES for slot in slots)
        return large or self._now() - self._since >= _LONG_S


def _waits_for_proof(session: Session, clients: Clients) -> bool:
    snapshot = clients.pipeline.find(session.run, session.client_id, session.waits_for_proof_of)
    return snapshot is not None and not snapshot.settled(verified=True)


def _is_waited_for(snapshot: Snapshot, clients: Clients) -> bool:
    session = clients.sessions.get(snapshot.client_id)
    return session is not None and snapshot.number <= session.waits_for
