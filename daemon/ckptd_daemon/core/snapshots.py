"""The snapshots the daemon knows of: each one's state, and the ledger that finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ckptd.errors import CkptdError, OutcomeUnknown
from ckptd.link.wire import Notice, WireError
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.lifecycle import UNWRITTEN, Event, State, after

#: Snapshots of one run that are remembered after they were written; for older ones the disk is asked.
REMEMBERED: Final = 256

_STANDING: Final = UNWRITTEN | {State.COMMITTED, State.VERIFIED}


@dataclass(eq=False)
class Snapshot:
    """One snapshot.

    Attributes:
        number: The client's number of it.
        sequence: Its commit counter; given on acceptance.
        slot: What holds it, until it is written or given up.
        step: 0 until the descriptor was read.
        name: Its folder, once committed.
        error: Why it failed, or was put off.
        job: The number of the disk's job that writes it, while it isn't put off.
        retry_at: When it is tried again (monotonic seconds); None unless put off.
        retry_s: The pause before that.
        room_waits: How often it was put off because retention was about to free the room it needs.
        waits_for_room: Whether it is put off for that now: soon over, so whoever waits for it goes on waiting.
    """

    run: str
    client_id: str
    number: int
    sequence: int
    slot: Slot | None
    state: State = State.STAGED
    step: int = 0
    name: str = ""
    nbytes: int = 0
    seconds: float = 0.0
    error: CkptdError | None = None
    job: int = -1
    retry_at: float | None = None
    retry_s: float = 0.0
    room_waits: int = 0
    waits_for_room: bool = False

    def becomes(self, event: Event) -> None:
        self.state = after(self.state, event)

    @property
    def word(self) -> str:
        """Its state as a client hears it."""
        if self.state is State.FAILED and isinstance(self.error, OutcomeUnknown):
            return "unknown"
        return "corrupt" if self.state is State.GONE else self.state.value

    def settled(self, *, verified: bool) -> bool:
        """Whether waiting for it (to be committed, or also verified) makes no more sense."""
        if self.state in UNWRITTEN:
            # Put off: it may be hours until there is room on the disk.
            return self.retry_at is not None and not self.waits_for_room
        return not verified or self.state is not State.COMMITTED

    def notice(self, message_id: int, *, slot: str = "", slot_free: bool = False) -> Notice:
        return Notice(
            id=message_id, client_id=self.client_id, snapshot=self.number, step=self.step, state=self.word,
            sequence=self.sequence, name=self.name, slot=slot, slot_free=slot_free,
            error=None if self.error is None else WireError.of(self.error),
        )  # fmt: skip


class Ledger:
    """All snapshots of one run, oldest first."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], Snapshot] = {}

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._by_key.values()))

    def get(self, client_id: str, number: int) -> Snapshot | None:
        return self._by_key.get((client_id, number))

    def named(self, name: str) -> Snapshot | None:
        """The snapshot that became this folder."""
        return next((s for s in reversed(self._by_key.values()) if s.name == name), None)

    def unwritten(self) -> list[Snapshot]:
        return [snapshot for snapshot in self if snapshot.state in UNWRITTEN]

    def is_overtaken(self, client_id: str, number: int, sequence: int = 0) -> bool:
        """Whether a newer snapshot of this client stands, and this one would be put behind it.

        sequence: The one it was given before; 0: it has none yet.
        """
        return any(
            one.client_id == client_id and one.number > number and one.state in _STANDING
            for one in self
            if sequence == 0 or one.sequence < sequence
        )

    def add(self, snapshot: Snapshot) -> None:
        self._by_key[snapshot.client_id, snapshot.number] = snapshot
        written = [key for key, known in self._by_key.items() if known.state not in UNWRITTEN]
        for key in written[: max(0, len(written) - REMEMBERED)]:
            del self._by_key[key]
