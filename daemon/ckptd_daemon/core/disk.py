"""The one thread that changes what is on disk, and what it knows of each run.

Everything that writes, renames or removes below the root happens here, one thing after the other, so that
a position is decided on the series as it is, and a slot is free before anything could remove its checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ckptd.disk import own_leftovers
from ckptd.disk.commit import Committed, Position, commit_snapshot
from ckptd.disk.priority import Urgency
from ckptd.disk.rootdir import Root
from ckptd.disk.verification import Report
from ckptd.disk.write_rate import WriteRate
from ckptd.disk.writing import Writing
from ckptd.errors import CkptdError, OutcomeUnknown, ProtocolError, RootMoved
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import decode
from ckptd.snapshot.slots import Slot, SlotHeader
from ckptd_daemon.core.unentered import Unentered
from ckptd_daemon.core.upkeep import Upkeep
from ckptd_daemon.core.worker import Worker
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.name_watch import NameWatch
from ckptd_daemon.series.pruning import MOST_AT_ONCE
from ckptd_daemon.series.settings_file import Settings

log = logging.getLogger(__name__)


class Commit(Protocol):
    """As ckptd.disk.commit.commit_snapshot; another one is handed in by tests."""

    def __call__(
        self, run_dir: Any, descriptor: Descriptor, data: memoryview, position: Position, /, *,
        check: Callable[[], None],
    ) -> Committed: ...  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the loop needs to know of a run that was opened.

    Attributes:
        problems: What its start-up scan found, one line each.
        unverified: Names still to be proved.
    """

    run_id: str
    highest_sequence: int
    problems: tuple[str, ...]
    unverified: tuple[str, ...]
    summary: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Written:
    """A snapshot that is durable; its slot is free.

    Attributes:
        earlier: It had been committed before this daemon looked (a crash came between commit and release).
    """

    name: str
    step: int
    nbytes: int
    seconds: float
    earlier: bool = False


@dataclass(frozen=True)
class Overtaken:
    """A newer snapshot of its client is on disk, so this one wasn't written: it would become the latest."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of a report: "verified", "corrupt" or "gone"."""

    verdict: str
    summary: Mapping[str, Any]


class Disk:
    """The catalogues of all runs. Use `submit` from the loop; the other methods are for jobs.

    Args:
        root: The root, its lock held.
        settings: The policies.
        commit: What writes a snapshot.
        catalogue: What keeps one run. None for a Catalogue that the kernel tells of changes.
        urgency: Whether somebody waits for what is written; it changes in the loop.
        in_place: Raises RootMoved when the root's path leads to it no more.

    Attributes:
        writing: How files are written.
        root_lost: Called in the loop before anything that failed because of that; needn't return.
    """

    def __init__(
        self, root: Root, settings: Settings, *, commit: Commit | None = None,
        catalogue: Callable[[Root, str], Catalogue] | None = None, urgency: Urgency | None = None,
        in_place: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._in_place = in_place
        self.root_lost: Callable[[RootMoved], None] = lambda _: None
        self.root, self._settings = root, settings
        self._names = NameWatch()
        self._new_catalogue = catalogue or partial(Catalogue, watch=self._names)
        self.writing = Writing(urgency=urgency or Urgency(), rate=WriteRate(settings.max_write_rate))
        self._commit = commit or partial(commit_snapshot, writing=self.writing)
        self._catalogues: dict[str, Catalogue] = {}
        self._problems: dict[str, tuple[str, ...]] = {}
        self._unentered, self._upkeep = Unentered(), Upkeep()
        self._tidying = self._catching_up = False
        self._to_note = set[str]()
        self.worker = Worker("ckptd-disk", self._note_newest)

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool = False) -> int:
        """Have a job done; see Worker.submit."""
        return self.worker.submit(work, done, urgent=urgent)

    def withdraw(self, job: int) -> bool:
        """Take a job back that hasn't begun; see Worker.withdraw."""
        return self.worker.withdraw(job)

    def close(self) -> None:
        """Once its thread has ended: the kernel isn't asked any more what others do."""
        self._names.close()

    # --- jobs ------------------------------------------------------------------------------------

    def open_run(self, run: str) -> RunFacts:
        """Open a run, or look at it again. Raises what Catalogue.open raises; it is tried anew next time."""
        catalogue = self._catalogue(run)
        return RunFacts(
            run_id=catalogue.run_id, highest_sequence=catalogue.highest_sequence,
            problems=self._problems[run], unverified=tuple(catalogue.unverified()),
            summary=catalogue.summary(),
        )  # fmt: skip

    def write(self, slot: Slot, sequence: int, started: Callable[[int], None]) -> Written | Overtaken:
        """Make the snapshot in `slot` durable under `sequence` and free the slot.

        Args:
            slot: Sealed, or left in the middle of writing by a daemon that died.
            sequence: Goes into the header before the first byte is written.
            started: Called in the loop with the step, once it is known; of what is small no sooner than it is written.

        Raises:
            ProtocolError: The slot's content is damaged or impossible; trying again is no use.
            NoSpace, SaveFailed, OutcomeUnknown, OSError: Not written (or not known to be); the slot still
                holds it.
        """
        header = slot.header()
        descriptor = decode(slot.descriptor())
        _check_same(header, descriptor)
        catalogue = self._catalogue(header.run)
        found = catalogue.find(header.client_id, header.snapshot)
        if found is None and catalogue.is_overtaken(descriptor, sequence):
            return Overtaken(descriptor.step)
        large = header.data_bytes >= self.writing.large_from_bytes
        self.worker.post(lambda: started(descriptor.step), at_once=large)
        if found is not None:
            _free(slot)
            return Written(name=found.name, step=descriptor.step, nbytes=0, seconds=0.0, earlier=True)
        slot.mark_writing(sequence)
        try:
            committed = self._write(catalogue, header, descriptor, slot, sequence)
        finally:  # moved meanwhile, a failure says nothing, and nobody can say where a success is: the slot is kept
            with contextlib.suppress(OSError):
                self._check_root()
        _free(slot)  # before the acknowledgement, and before anything could remove the checkpoint
        self._unentered.add(catalogue, committed)
        return Written(
            name=committed.name, step=descriptor.step, nbytes=committed.bytes, seconds=committed.seconds
        )

    def sum_up(self, run: str, *, at_once: bool = False) -> Mapping[str, Any]:
        """Something was committed or judged: do what is owed for it, now or when it is due; returns the run's summary.

        at_once: Somebody waits for the room that retention makes.
        """
        if self._upkeep.owe(run, retention=False) or at_once:
            self.keep_up(run)
        return self._catalogue(run).summary()

    def judge(self, run: str, report: Report) -> Judged:
        """Act on the verifier's report: mark or quarantine. What retention may remove now is owed; see sum_up."""
        catalogue = self._catalogue(run)
        verdict = catalogue.apply_report(report)
        self._upkeep.owe(run, retention=verdict == "verified")
        return Judged(verdict=verdict, summary=catalogue.summary())

    def keep_up(self, run: str) -> int:
        """Do for the run what is owed to it: retention, and its index, a cache; returns how many were removed.

        What can't be done now is done later: it takes nothing from what was committed or proved.
        """
        catalogue = self._catalogue(run)
        retention, removed = self._upkeep.begin(run), 0
        try:
            if retention:
                removed = len(catalogue.apply_retention(self._settings.policy_for(run)))
            catalogue.write_index()
        except (CkptdError, OSError) as error:
            log.warning("run.not_kept_up run=%s error=%s; tried again later", run, error)
            self._upkeep.failed(run, retention=retention)
            return removed
        self._upkeep.end(run, catalogue.listed, more=removed >= MOST_AT_ONCE)
        if catalogue.holds_back:  # seen again in a while
            self._upkeep.failed(run, retention=True)
        return removed

    def find(self, run: str, client_id: str, number: int) -> tuple[str, int, bool] | None:
        """(name, sequence, verified) of the checkpoint that this snapshot became, or None."""
        catalogue = self._catalogue(run)
        found = catalogue.find(client_id, number)
        return None if found is None else (found.name, found.sequence or 0, found.verified)

    def tidy(self) -> None:
        """From the loop: have what failed writes left below the root removed, when there is something."""
        if self._tidying or not own_leftovers.any_left(self.root.path):
            return

        def tidied(_: object) -> None:
            self._tidying = False

        self._tidying = True
        self.submit(lambda: own_leftovers.remove(self.root.path), tidied)

    def catch_up(self) -> None:
        """From the loop: have done what was owed to large runs and is due."""
        if self._catching_up or not (runs := self._upkeep.due()):
            return

        def caught_up(result: object) -> None:
            self._catching_up = False
            if isinstance(result, Exception):
                log.error("run.not_kept_up error=%s", result)

        self._catching_up = True
        self.submit(lambda: [self.keep_up(run) for run in runs], caught_up)

    # --- inside ----------------------------------------------------------------------------------

    def _note_newest(self) -> None:
        """Nothing is to be done now, and nothing was just before."""
        runs, self._to_note = self._to_note, set()
        with contextlib.suppress(RootMoved, OSError):  # the next job meets it too, and says so
            self._in_place()
            for catalogue in (self._catalogues[run] for run in runs if run in self._catalogues):
                catalogue.note_newest()

    def _check_root(self) -> None:
        try:
            self._in_place()
        except RootMoved as error:
            self.worker.post(partial(self.root_lost, error))
            raise

    def _catalogue(self, run: str) -> Catalogue:
        self._check_root()
        self._unentered.enter()
        self._to_note.add(run)
        catalogue = self._catalogues.get(run)
        if catalogue is None:
            began = time.monotonic()
            catalogue = self._new_catalogue(self.root, run)
            self._problems[run] = tuple(catalogue.open())
            self._catalogues[run] = catalogue
            log.info("run.opened run=%s seconds=%.3f", run, time.monotonic() - began)
        return catalogue

    def _write(
        self,
        catalogue: Catalogue,
        header: SlotHeader,
        descriptor: Descriptor,
        slot: Slot,
        sequence: int,
    ) -> Committed:
        position = catalogue.position_for(descriptor, sequence)
        view = slot.data[: header.data_bytes]
        try:
            return self._commit(
                self.root.run_dir(header.run),
                descriptor,
                view,
                position,
                check=lambda: slot.check(view, threads=len(os.sched_getaffinity(0))),
            )
        except OutcomeUnknown:
            with contextlib.suppress(OSError):  # else it stays unknown
                catalogue.rescan()  # what is on disk decides
            raise
        except CkptdError:
            slot.refuse_cut()  # then trying again is no use
            raise
        finally:
            view.release()


def _free(slot: Slot) -> None:
    try:
        slot.release()
    except (
        ProtocolError
    ) as error:  # its client destroyed the header meanwhile: nobody can adopt it again either
        log.warning("slot.not_freed slot=%s error=%s", slot.name, error)


def _check_same(header: SlotHeader, descriptor: Descriptor) -> None:
    """Whether the descriptor is of the snapshot that the header names."""
    said = (header.run, header.client_id, header.snapshot, header.data_bytes)
    seen = (descriptor.run, descriptor.client_id, descriptor.snapshot, descriptor.data_bytes)
    if said != seen:
        raise ProtocolError("the descriptor is of another snapshot", seen=str(seen), wanted=str(said))
