"""The memory that clients' snapshots have in the daemon's charge, counted, and held against the root's budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptd.errors import OverBudget
from ckptd_daemon.series.budget import Budget

#: Who has memory: (client id, bytes) of each piece.
Holder = Callable[[], Iterable[tuple[str, int]]]


class StagedBytes:
    """Of the loop's thread.

    Args:
        budget: The bounds.
        holders: Each tells of its pieces; what is being made counts too.
    """

    def __init__(self, budget: Budget, *holders: Holder) -> None:
        self.budget = budget
        self._holders = list(holders)

    def count_also(self, holder: Holder) -> None:
        """Here is memory of clients too."""
        self._holders.append(holder)

    def of(self, client_id: str | None = None) -> int:
        """Bytes that this client has; None: all of them."""
        pieces = (piece for holder in self._holders for piece in holder())
        return sum(size for owner, size in pieces if client_id in (None, owner))

    def refusal(self, client_id: str, asked: str, wanted: int) -> OverBudget | None:
        """What check raises."""
        try:
            self.check(client_id, asked, wanted)
        except OverBudget as error:
            return error
        return None

    def check(self, client_id: str, asked: str, wanted: int) -> None:
        """Raise OverBudget when a client may not have `wanted` bytes more; `asked` says what for."""
        self.budget.check(asked, wanted, held=self.of(client_id), held_by_all=self.of())
