"""What was committed and isn't in its run's catalogue yet: the acknowledgement doesn't wait for that."""

from __future__ import annotations

import logging
from collections import deque

from ckptd.disk.commit import Committed
from ckptd.limits import MIB
from ckptd_daemon.series.catalogue import Catalogue

log = logging.getLogger(__name__)


class Unentered:
    """Of the disk's thread. Every job that looks into a catalogue begins with `enter`, so that none finds an old one;
    a commit is followed by such a job at once."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Catalogue, Committed]] = deque()

    def add(self, catalogue: Catalogue, committed: Committed) -> None:
        """This is durable, and its slot is free."""
        self._waiting.append((catalogue, committed))

    def enter(self) -> None:
        """Tell the catalogues and the log of it."""
        while self._waiting:
            catalogue, done = self._waiting.popleft()
            catalogue.added(done)
            log.info(
                "snapshot.committed run=%s step=%d sequence=%d name=%s bytes=%d seconds=%.3f mib_per_s=%.0f",
                done.index.run, done.index.step, done.index.sequence, done.name, done.bytes, done.seconds,
                done.bytes / MIB / max(done.seconds, 1e-6),
            )  # fmt: skip
