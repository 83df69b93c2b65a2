"""One run, as the daemon's loop knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ckptd_daemon.core.lifecycle import State
from ckptd_daemon.core.snapshots import Ledger, Snapshot

MOST_SEQUENCE: Final = 10**15  #: a slot that says more is lying


@dataclass
class Book:
    """The sequences it gives, the snapshots it has, and what became of the newest ones.

    Attributes:
        superseded: Accepted snapshots that gave way to newer ones.
        skipped: Snapshots that clients never took, as they say; `last_skipped` is the step of the newest.
    """

    run_id: str
    next_sequence: int
    summary: Mapping[str, Any]
    ledger: Ledger = field(default_factory=Ledger)
    last_committed: Snapshot | None = None
    failed: int = 0
    last_failed: Snapshot | None = None
    superseded: int = 0
    last_superseded: Snapshot | None = None
    skipped: int = 0
    last_skipped: int | None = None

    def lost(self, client_id: str) -> int:
        """How many snapshots of others than this client could not be written, newer than the newest that was."""
        newest = 0 if self.last_committed is None else self.last_committed.sequence
        failed = (s for s in self.ledger if s.state is State.FAILED and s.client_id != client_id)
        return sum(snapshot.sequence > newest for snapshot in failed)

    def take_sequence(self, given: int = 0) -> int:
        sequence = given if 0 < given <= MOST_SEQUENCE else self.next_sequence
        self.next_sequence = max(self.next_sequence, sequence + 1)
        return sequence
