"""What went wrong with a client's snapshots and hasn't been said yet, and for how long nothing was saved.

A training run must not die of a full disk at once, nor go on for days without a checkpoint: failures
are warnings at first and an error once nothing was committed for `max_unsaved_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ckptd.errors import CkptdError, SaveFailed
from ckptd.warning import warn

__all__ = ["Failure", "Failures"]

_MAX_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class Failure:
    """One snapshot that went wrong.

    Attributes:
        snapshot: Its number.
        step: Its step.
        error: The cause.
        outcome: Follows "step N" in the message.
        chosen: It is what on_busy asks for: said, and never raised.
    """

    snapshot: int
    step: int
    error: CkptdError
    outcome: str = "was not saved"
    chosen: bool = False


class Failures:
    """The ledger of one client. Times are seconds of the monotonic clock, handed in.

    Args:
        on_error: "warn" or "raise".
        max_unsaved_s: How long failures stay warnings while nothing is committed.
    """

    def __init__(self, on_error: Literal["warn", "raise"], max_unsaved_s: float) -> None:
        self._on_error, self._max_unsaved_s = on_error, max_unsaved_s
        self._unsaid: list[Failure] = []
        self._unsaved_since: float | None = None
        self._last: Failure | None = None

    def attempted(self, now: float) -> None:
        """A snapshot was asked for; from the first one on that isn't committed, the clock runs."""
        if self._unsaved_since is None:
            self._unsaved_since = now

    def committed(self, now: float, *, others_wait: bool) -> None:
        """Something was committed: the clock starts anew, or stops when no other snapshot waits."""
        self._unsaved_since = now if others_wait else None
        self._last = None

    def failed(self, failure: Failure) -> None:
        self._last = failure
        self._unsaid.append(failure)
        del self._unsaid[:-_MAX_KEPT]

    def was_told(self, snapshot: int) -> None:
        self._unsaid = [failure for failure in self._unsaid if failure.snapshot != snapshot]

    def take(self) -> list[str]:
        """The messages of everything that wasn't said yet, for a caller who says it in another way."""
        messages = [str(_with_step(failure)) for failure in self._unsaid]
        self._unsaid.clear()
        return messages

    def surface(self, now: float, *, may_raise: bool = True) -> None:
        """Say everything that wasn't said yet.

        Raises:
            CkptdError: With on_error="raise" the first failure; else SaveFailed once nothing was committed
                for max_unsaved_s. With may_raise=False (an exception is on its way already) nothing.
        """
        self.say(may_raise=may_raise)
        since, last = self._unsaved_since, self._last
        if may_raise and last is not None and since is not None and now - since > self._max_unsaved_s:
            raise SaveFailed(
                f"nothing was committed for {now - since:.0f} s", where=last.error.where,
                seen=f"step {last.step}: {last.error.what}",
                wanted=f"at least once in {self._max_unsaved_s:g} s",
                todo=last.error.todo or "remove the cause, or raise max_unsaved_s",
            ) from last.error  # fmt: skip

    def say(self, *, may_raise: bool = True) -> None:
        """Say what wasn't said yet, however long nothing was committed: for a caller who is about to try again.

        Raises:
            CkptdError: With on_error="raise" the first failure.
        """
        while self._unsaid:
            failure = self._unsaid.pop(0)
            error = _with_step(failure)
            if self._on_error == "raise" and may_raise and not failure.chosen:
                raise error from failure.error
            warn(str(error))


def _with_step(failure: Failure) -> CkptdError:
    error = failure.error
    return type(error)(
        f"step {failure.step} {failure.outcome}: {error.what}",
        where=error.where, seen=error.seen, wanted=error.wanted, todo=error.todo,
    )  # fmt: skip
