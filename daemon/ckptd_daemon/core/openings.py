"""Runs that are opened for whoever attaches: one at a time, so that what was accepted is written in between.

Opening one takes the disk's thread, before anything that waits to be written; whoever attaches to many must not keep
the others from saving.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptd.errors import ProtocolError
from ckptd_daemon.core.disk import Disk, RunFacts

__all__ = ["Openings"]

Then = Callable[[RunFacts | Exception], None]


class Openings:
    """Of the loop's thread. Each connection has at most one that waits.

    Args:
        disk: Opens runs.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk, self._busy = disk, False
        self._waiting: dict[bytes, tuple[str, Then]] = {}

    def ask(self, identity: bytes, run: str, then: Then) -> None:
        """Have a run opened; `then` gets what came of it: an error at once, when the same connection asks again."""
        replaced = self._waiting.pop(identity, None)
        if replaced is not None:
            replaced[1](ProtocolError("a newer request to attach has replaced this one"))
        self._waiting[identity] = run, then
        self._go_on()

    def _go_on(self) -> None:
        if self._busy or not self._waiting:
            return
        run, then = self._waiting.pop(next(iter(self._waiting)))
        self._busy = True

        def opened(facts: RunFacts | Exception) -> None:
            self._busy = False
            try:
                then(facts)
            finally:
                self._go_on()

        self._disk.submit(lambda: self._disk.open_run(run), opened, urgent=True)
