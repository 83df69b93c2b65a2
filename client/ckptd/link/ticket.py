"""A ticket: what became of one snapshot, as far as this client knows."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Protocol

from ckptd.errors import CkptdError, InvalidArgument, OutcomeUnknown, SaveFailed

__all__ = ["WAIT_TIMEOUT_S", "Ticket", "TicketState"]

WAIT_TIMEOUT_S: Final = 300.0  #: default bound of Ticket.wait() and Client.wait()

TicketState = Literal[
    "copying",
    "staged",
    "writing",
    "unknown",
    "failed",
    "superseded",
    "skipped",
    "committed",
    "verified",
    "corrupt",
]

#: A state is left only for one of a higher rank: a late or repeated notice takes nothing back, "unknown" and
#: "failed" may still turn out to be committed, and nothing is committed by a guess.
_RANK: Final[dict[str, int]] = {
    "copying": -1, "staged": 0, "writing": 1, "unknown": 2, "skipped": 3, "superseded": 3, "failed": 3,
    "committed": 4, "verified": 5, "corrupt": 6,
}  # fmt: skip
_WAS_STAGED: Final = ("writing", "unknown", "committed", "verified", "corrupt")


class TicketSource(Protocol):
    """Whoever brings news of tickets: the writer."""

    def look(self) -> None:
        """Take in what has arrived, without waiting."""

    def wait_for(self, ticket: Ticket, state: str, timeout_s: float) -> None:
        """Return when the ticket has reached `state` or can't any more; TimedOut after the bound."""

    def was_told(self, ticket: Ticket) -> None:
        """The ticket's failure was raised to the caller and needn't be said again."""


class Ticket:
    """One snapshot on its way to disk, as `Client.snapshot` returned it.

    Attributes:
        snapshot: The client's number of this snapshot, from 1.
        step: Its step.
        sequence: The run's commit counter it was given; None until the daemon has accepted it. A snapshot that is
            streamed lies in this process alone until then, and dies with it.
        path: Its checkpoint folder; None until it is committed.
        error: Why it failed; None while it hasn't.
    """

    def __init__(self, snapshot: int, step: int, source: TicketSource, state: TicketState = "staged") -> None:
        self.snapshot, self.step = snapshot, step
        self.sequence: int | None = None
        self.path: Path | None = None
        self.error: CkptdError | None = None
        self._state = state
        self._source = source

    def __repr__(self) -> str:
        return f"Ticket(snapshot={self.snapshot}, step={self.step}, state={self._state!r})"

    @property
    def state(self) -> TicketState:
        """The newest state known, after taking in what the daemon has sent meanwhile, as long as the client is open.

        copying (only with overlap=True: it dies with this process), staged (in a slot; see `sequence`), writing, committed
        (durable on disk), verified (re-read, every hash equal); corrupt, failed; superseded (it gave its slot up
        for a newer one); skipped (never taken: no slot came free in time); unknown (it may be on disk or not).
        """
        self._source.look()
        return self._state

    @property
    def finished(self) -> bool:
        """Whether it is committed, or can't be any more as far as is known now."""
        return _RANK[self._state] >= _RANK["skipped"]

    @property
    def committed(self) -> bool:
        """Whether it was made durable (it may have been found corrupt later)."""
        return _RANK[self._state] >= _RANK["committed"]

    def wait(
        self,
        state: Literal["staged", "committed", "verified"] = "committed",
        *,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Ticket:
        """Wait until the snapshot is durable, or also verified; returns the ticket itself.

        Args:
            state: What to wait for. "staged" is of use with overlap=True: then it is copied, and parameters may be
                changed outside of an optimizer's step.
            timeout_s: Bound in seconds (default 300).

        Raises:
            TimedOut: Not within the bound; it may still happen.
            OutcomeUnknown: The daemon was lost, and the one that answers now doesn't know this snapshot.
            NoSpace, SaveFailed: It was not saved.
            CorruptCheckpoint: It was committed, and its bytes on disk are wrong.
            CheckpointGone: It was committed, and removed by hand before it could be verified.
            ClientClosed: The client is closed, and hadn't heard of it by then.
        """
        if state not in ("staged", "committed", "verified"):
            raise InvalidArgument(
                "can't wait for this", where="state", seen=repr(state), wanted="staged, committed or verified"
            )
        self._source.wait_for(self, state, timeout_s)
        if not self.has_reached(state):
            self._source.was_told(self)
            raise self.failure()
        return self

    # --- for the writer --------------------------------------------------------------------------

    def has_reached(self, state: str) -> bool:
        return (
            self._state == state
            or (self._state == "verified" and state == "committed")
            or (self._state == "corrupt" and state == "committed")
            or (state == "staged" and self._state in _WAS_STAGED)
        )

    @property
    def waits(self) -> bool:
        """Whether it is staged and nothing was heard of its being written."""
        return self._state == "staged"

    @property
    def settled(self) -> bool:
        """Whether no further news of it can come."""
        return self._state in ("verified", "corrupt", "skipped")

    def cannot_reach(self, state: str) -> bool:
        """Whether waiting for `state` makes no more sense."""
        return self._state in ("failed", "superseded", "skipped", "unknown") or (
            self._state == "corrupt" and state == "verified"
        )

    def become(self, state: TicketState, *, error: CkptdError | None = None) -> bool:
        """Move to `state`; False, and nothing happens, when that would be a step back."""
        if _RANK[state] <= _RANK[self._state]:
            return False
        self._state = state
        self.error = error if state not in ("committed", "verified") else None
        return True

    def failure(self) -> CkptdError:
        """The error to raise for a snapshot that didn't become what was waited for."""
        if self.error is not None:
            return self.error
        if self._state == "unknown":
            return OutcomeUnknown(
                f"whether step {self.step} was saved can't be told", seen=f"snapshot {self.snapshot}",
                todo="look with: ckptd list",
            )  # fmt: skip
        return SaveFailed(f"step {self.step} was not saved", seen=self._state)
