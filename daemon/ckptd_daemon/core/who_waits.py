"""Whether somebody waits for what is being written, or verified: then it isn't done at the lowest priority."""

from __future__ import annotations

from ckptd_daemon.core.clients import Clients
from ckptd_daemon.core.sessions import Session
from ckptd_daemon.core.snapshots import Snapshot


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


def _waits_for_proof(session: Session, clients: Clients) -> bool:
    snapshot = clients.pipeline.find(session.run, session.client_id, session.waits_for_proof_of)
    return snapshot is not None and not snapshot.settled(verified=True)


def _is_waited_for(snapshot: Snapshot, clients: Clients) -> bool:
    session = clients.sessions.get(snapshot.client_id)
    return session is not None and snapshot.number <= session.waits_for
