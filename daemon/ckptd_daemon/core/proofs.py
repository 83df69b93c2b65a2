"""The proofs of slots that wait: the hash of what was sealed, so that a trainer that comes back may restore from there.

Most snapshots are written at once and need none. One that isn't written PROVE_AFTER_S after it was accepted is hashed
in a thread of its own, at the lowest priority; while its trainer lives and trains, LIVING_AFTER_S after. Damage to its
memory from then on is found, by the restore and by the write; before, nobody could tell.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Final

from ckptd.disk.priority import lower_this_thread
from ckptd.errors import ProtocolError
from ckptd.snapshot.slot_proof import Proof, hash_of
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.lifecycle import UNWRITTEN
from ckptd_daemon.core.pipeline import Pipeline
from ckptd_daemon.core.slotpool import SlotPool
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.worker import Worker

log = logging.getLogger(__name__)

PROVE_AFTER_S: Final = 1.0
LIVING_AFTER_S: Final = 10.0


class Proofs:
    """Makes them. Of the loop's thread only.

    Args:
        pipeline: Whose snapshots.
        pool: The slots that another process may open.
        worker: The thread; given the lowest priority for good.
        now: A monotonic clock in seconds.
        lives: Whether a client is there: nobody restores from its slots then, and its trainer needs the CPUs.
    """

    def __init__(
        self, pipeline: Pipeline, pool: SlotPool, worker: Worker, now: Callable[[], float],
        lives: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._lives = lives
        self._pipeline, self._pool, self._worker, self._now = pipeline, pool, worker, now
        self._since: dict[Snapshot, float] = {}  # since when each of the unwritten is known
        self._asked: set[Snapshot] = set()
        self._stopped = False
        worker.submit(lower_this_thread, lambda _: None)

    def look(self) -> None:
        """Have hashed what has waited long enough; returns at once."""
        now, waiting = self._now(), self._pipeline.unwritten()
        self._since = {one: self._since.get(one, now) for one in waiting}
        self._asked.intersection_update(waiting)
        for snapshot, since in self._since.items():
            if now - since < PROVE_AFTER_S or snapshot in self._asked:
                continue
            if now - since >= LIVING_AFTER_S or not self._lives(snapshot.client_id):
                self._asked.add(snapshot)
                if snapshot.slot is not None and snapshot.slot in self._pool:
                    self._prove(snapshot, snapshot.slot)

    def stop(self) -> None:
        """Hash no more; the hash that is being made is given up."""
        self._stopped = True

    def _prove(self, snapshot: Snapshot, slot: Slot) -> None:
        try:
            header = slot.header()
            proven = slot.proof() is not None  # by the daemon before this one
        except ProtocolError:
            return  # destroyed: the write says so
        if proven:
            return
        data = slot.data[: header.data_bytes]  # keeps the memory, whatever becomes of the slot

        def read(start: int, nbytes: int) -> memoryview:
            if self._stopped or snapshot.state not in UNWRITTEN:
                raise InterruptedError
            return data[start : start + nbytes]

        def done(result: str | Exception) -> None:
            data.release()
            if isinstance(result, str) and snapshot.slot is slot:
                with contextlib.suppress(ProtocolError):
                    slot.prove(Proof(header.generation, header.data_bytes, result))
                log.info("snapshot.proven run=%s sequence=%d", snapshot.run, snapshot.sequence)
            elif isinstance(result, Exception) and not isinstance(result, InterruptedError):
                log.error("snapshot.not_proven run=%s error=%r", snapshot.run, result)

        self._worker.submit(lambda: hash_of(read, header.data_bytes), done)
