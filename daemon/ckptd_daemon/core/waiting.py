"""Who waits until snapshots are settled, and the answer: how many of them failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptd_daemon.core.lifecycle import UNWRITTEN, State
from ckptd_daemon.core.snapshots import Snapshot


@dataclass(eq=False)
class Waiting:
    """A request to be told when all of these are settled."""

    snapshots: list[Snapshot]
    verified: bool
    reply: Callable[[int], object]
    owner: bytes

    @property
    def over(self) -> bool:
        return all(snapshot.settled(verified=self.verified) for snapshot in self.snapshots)

    def answer(self) -> None:
        self.reply(sum(_is_failure(snapshot) for snapshot in self.snapshots))


class WaitingList:
    """Of the loop's thread only."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def count(self, owner: bytes | None = None) -> int:
        """How many of this connection wait, or of all."""
        return sum(owner in (None, waiting.owner) for waiting in self._waiting)

    def any_for_proof(self) -> bool:
        """Whether one waits until all is verified."""
        return any(waiting.verified for waiting in self._waiting)

    def add(
        self, snapshots: list[Snapshot], *, verified: bool, reply: Callable[[int], object], owner: bytes
    ) -> None:
        """Call reply(how many failed) once all of them are settled; at once when they are."""
        waiting = Waiting(snapshots, verified, reply, owner)
        if waiting.over:
            waiting.answer()
        else:
            self._waiting.append(waiting)

    def answer(self) -> None:
        """Something may be settled now: answer those whose wait is over."""
        for waiting in [waiting for waiting in self._waiting if waiting.over]:
            self._waiting.remove(waiting)
            waiting.answer()


def _is_failure(snapshot: Snapshot) -> bool:
    return snapshot.state in (State.FAILED, State.CORRUPT) or snapshot.state in UNWRITTEN
