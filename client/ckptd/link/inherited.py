"""The snapshot of an earlier client that was restored from its slot: nobody else waits for it to become durable."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import read_series
from ckptd.disk.staged_line import Accepted
from ckptd.errors import CkptdError, OutcomeUnknown, SaveFailed
from ckptd.link import wire
from ckptd.link.failures import Failure, Failures
from ckptd.link.session import Session

__all__ = ["Inherited"]

_ASK_EVERY_S: Final = 0.2  # the daemon tells nobody by itself: its client is dead
_SAVED: Final = ("committed", "verified")


class Inherited:
    """At most one. It is waited for like a snapshot of this client's own until it, or a later one of those, is on disk.

    Args:
        root: The root.
        run: The run's name.
        failures: Where it is entered when it doesn't become durable.
    """

    def __init__(self, root: Root, run: str, failures: Failures) -> None:
        self._root, self._run, self._failures = root, run, failures
        self._accepted: Accepted | None = None
        self._ask_at = 0.0

    def __bool__(self) -> bool:
        """Whether there is one that isn't known to be saved or lost."""
        return self._accepted is not None

    def begin(self, accepted: Accepted) -> None:
        """This one was restored."""
        self._accepted, self._ask_at = accepted, 0.0

    def replaced(self) -> None:
        """Something newer is durable."""
        self._accepted = None

    def ask(self, session: Session) -> None:
        """Ask the daemon what has become of it, if that is due."""
        now = time.monotonic()
        if self._accepted is not None and session.connected and now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            d = self._accepted.descriptor
            session.send(wire.Resolve(id=0, client_id=d.client_id, snapshot=d.snapshot))

    def take(self, notice: wire.Notice) -> bool:
        """Enter the answer; False when it is about another snapshot."""
        if self._accepted is None:
            return False
        d = self._accepted.descriptor
        if (notice.client_id, notice.snapshot) != (d.client_id, d.snapshot):
            return False
        if notice.state in (*_SAVED, "superseded"):  # by one that is on disk
            self._accepted = None
        elif notice.state in ("failed", "corrupt", "unknown"):
            error = notice.error.exception() if notice.error is not None else SaveFailed(notice.state)
            self._enter(error, "was restored from shared memory and is not on disk")
        return True

    def look_on_disk(self) -> None:
        """With no daemon to ask."""
        if self._accepted is None:
            return
        d = self._accepted.descriptor
        with contextlib.suppress(OSError, CkptdError):  # then it can't be told, which is what the caller says
            for entry in read_series(self._root, self._run).entries:
                index = entry.index
                if index is not None and (index.client_id, index.snapshot) == (d.client_id, d.snapshot):
                    self._accepted = None
                    return

    def give_up(self, why: CkptdError) -> None:
        """At the end: it won't be heard of any more."""
        if self._accepted is not None:
            error = OutcomeUnknown(
                why.what, where=why.where, seen=why.seen, wanted=why.wanted,
                todo=why.todo or f"look for step {self._accepted.descriptor.step} with: ckptd list",
            )  # fmt: skip
            self._enter(error, "was restored from shared memory and may not be on disk yet")

    def _enter(self, error: CkptdError, outcome: str) -> None:
        if self._accepted is not None:
            step, self._accepted = self._accepted.descriptor.step, None
            self._failures.failed(Failure(0, step, error, outcome))
