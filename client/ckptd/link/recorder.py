"""Takes snapshots: captures the state, says what it is and where it goes on from, hands it to the writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ckptd.disk.rootdir import Root
from ckptd.disk.series import read_series
from ckptd.errors import CkptdError, NoDaemon, ReadFailed, SaveFailed, SharedMemoryTooSmall, TimedOut
from ckptd.format.records import CheckpointIndex
from ckptd.link.client_options import DEFAULT_CADENCE, ClientOptions
from ckptd.link.failures import Failure, Failures
from ckptd.link.headroom import with_headroom
from ckptd.link.resumed import Resumed
from ckptd.link.staging import Payload
from ckptd.link.ticket import Ticket
from ckptd.link.writers import Writer
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.descriptor_codec import encode
from ckptd.tensors.accumulation import accumulated_in, left_out
from ckptd.tensors.capture import Captured, capture
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.foreseeing import foresee
from ckptd.tensors.overlap import Overlap
from ckptd.tensors.pinned_memory import pin_reserved
from ckptd.tensors.state_copy import copy_at_once
from ckptd.versions import versions
from ckptd.warning import warn

__all__ = ["Recorder"]


class Recorder:
    """One client's snapshots, one after the other. The writer's lock guards it.

    Args:
        root: The root.
        run: The run's name.
        client_id: 32 hex digits.
        options: The client's settings.
        writer: Where snapshots go.
        failures: Where skipped ones are entered.
    """

    def __init__(
        self, root: Root, run: str, client_id: str, *,
        options: ClientOptions, writer: Writer, failures: Failures,
    ) -> None:  # fmt: skip
        self._root, self._run, self._client_id = root, run, client_id
        self._options, self._writer, self._failures = options, writer, failures
        self._count, self._reserved = 0, False
        self._threads = CopyThreads()
        self._overlap = Overlap() if options.overlap else None
        self._base_sequence: int | None = None
        self._base_snapshot, self._begins_line = 0, False
        self._base_before: tuple[int, ...] = ()
        self._earlier_seconds: float | None = None  # None: not looked up yet, see _seconds_before
        self._began = self._last_at = time.monotonic()
        self._last_step: int | None = None
        self._knows_last = self._said_gradients = False
        self._fitted: set[int] = set()  # sequences of checkpoints that were restored here and fitted whole

    def reserve(self, state: Mapping[Any, Any], at_least: int = 0) -> None:
        """Have memory for snapshots of `state`, what training adds to it foreseen; see Client.reserve."""
        size = with_headroom(max(at_least, foresee(state)), grew=False)
        try:
            self._writer.reserve(size)
        except SharedMemoryTooSmall as error:
            raise self._with_ways_out(error) from error
        pin_reserved(self._writer.memories())
        self._reserved = True

    def take(self, step: int, state: Mapping[Any, Any], metrics: dict[str, float]) -> Ticket:
        """Take one snapshot; see Client.snapshot. When no slot came free its ticket says skipped."""
        captured = capture(state)
        # A number is never used twice, whatever happens below: (client, snapshot) names one snapshot for
        # ever.
        self._count += 1
        self._last_step, self._last_at, self._knows_last = step, time.monotonic(), True
        ticket = Ticket(self._count, step, self._writer, "staged" if self._overlap is None else "copying")
        descriptor = encode(self._descriptor(ticket, captured, metrics))
        beside = None if self._overlap is None else self._overlap.beside(state, captured, self._threads)
        payload = Payload(
            lambda memory: copy_at_once(captured, memory, self._threads),
            captured.data_bytes,
            descriptor,
            beside,
        )
        self._failures.attempted(time.monotonic())
        try:
            self._submit(ticket, state, payload)
        except (TimedOut, NoDaemon, SaveFailed) as error:
            self._skip(ticket, error)
        self._say_if_gradients_are_left_out(step, state)
        for source in (self._overlap, self._writer):
            for note in () if source is None else source.take_notes():
                warn(note)
        return ticket

    def close(self) -> None:
        """End the threads that copy. Of the writer nothing is copied any more."""
        self._threads.close()
        if self._overlap is not None:
            self._overlap.close()

    def is_due(self, step: int) -> bool:
        """Whether the cadence wants a snapshot after `step`."""
        if not self._knows_last:
            entries = [one for one in read_series(self._root, self._run).entries if one.status == "committed"]
            self._last_step, self._knows_last = (entries[-1].step if entries else None), True
        cadence = self._options.cadence or DEFAULT_CADENCE
        return cadence.due(step, last_step=self._last_step, since_s=time.monotonic() - self._last_at)

    def knows(self, index: CheckpointIndex) -> bool:
        """Whether a checkpoint of the run is of the state as it was here: what that has more by now was made since.

        So is a snapshot taken here, and one that was restored here and fitted whole: not one between them, or later
        ones, of scripts that may have had less.
        """
        return index.client_id == self._client_id or index.sequence in self._fitted

    def go_on_from(self, resumed: Resumed | None, *, fits: bool, before: tuple[int, ...] = ()) -> None:
        """Later snapshots follow the checkpoint that was restored (None: the run's head).

        One that isn't of this run (it has no sequence) began elsewhere: the line and the run's seconds begin here,
        and for the cadence nothing of the run is saved yet. fits: it was compared whole with the state.
        before: What it went on from itself, when it is no checkpoint yet.
        """
        if resumed is not None and resumed.sequence is not None and fits:
            self._fitted.add(resumed.sequence)
        self._base_sequence = resumed.sequence if resumed is not None else None
        self._base_snapshot, self._base_before = self._count, before
        self._begins_line = resumed is not None and resumed.sequence is None
        self._earlier_seconds = None if resumed is None else 0.0 if self._begins_line else resumed.run_seconds
        self._began = self._last_at = time.monotonic()
        if resumed is not None:
            self._last_step, self._knows_last = (None if self._begins_line else resumed.step), True

    def _skip(self, ticket: Ticket, error: CkptdError) -> None:
        ticket.become("skipped", error=error)
        chosen = self._options.on_busy == "skip" and isinstance(error, TimedOut)
        self._failures.failed(Failure(ticket.snapshot, ticket.step, error, "was skipped", chosen=chosen))
        self._writer.skipped(ticket)

    def _submit(self, ticket: Ticket, state: Mapping[Any, Any], payload: Payload) -> None:
        wait_s = self._options.busy_timeout_s if self._options.on_busy != "skip" else 0.0
        if not self._reserved:
            self.reserve(state, payload.size)
        try:
            self._writer.submit(ticket, payload, busy_timeout_s=wait_s)
        except SharedMemoryTooSmall as error:
            raise self._with_ways_out(error) from error

    def _descriptor(self, ticket: Ticket, captured: Captured, metrics: dict[str, float]) -> Descriptor:
        return Descriptor(
            run=self._run, client_id=self._client_id, snapshot=ticket.snapshot, step=ticket.step,
            saved_at=time.time(), run_seconds=self._seconds_before() + time.monotonic() - self._began,
            base_sequence=self._base_sequence, base_snapshot=self._base_snapshot,
            base_before=self._base_before, begins_line=self._begins_line,
            metrics=metrics, versions=versions(), state=captured.state, tensors=captured.tensors,
            data_bytes=captured.data_bytes, sharding=self._options.sharding,
        )  # fmt: skip

    def _say_if_gradients_are_left_out(self, step: int, state: Mapping[Any, Any]) -> None:
        """Once per client. After the snapshot: where warnings are errors it is taken all the same."""
        if self._said_gradients or (where := accumulated_in(state)) is None:
            return
        self._said_gradients = True
        warn(f"step {step}: {left_out(where, 'snapshot')}")

    def _with_ways_out(self, error: SharedMemoryTooSmall) -> SharedMemoryTooSmall:
        fewer = "use Client(slots=1), " if self._options.slots != 1 else ""
        ways = f'enlarge /dev/shm (docker: --shm-size), {fewer}or save without it: Client(daemon="off")'
        if 'daemon="off"' in error.todo:
            ways = error.todo
        return SharedMemoryTooSmall(
            error.what, where=error.where, seen=error.seen, wanted=error.wanted, todo=ways
        )

    def _seconds_before(self) -> float:
        """The run's seconds before this client; without a restore the head's, read once.

        A head that can't be read now must not keep the snapshot from being taken: it is looked up again at the
        next one.
        """
        if self._earlier_seconds is None:
            try:
                head = read_series(self._root, self._run).head
            except (OSError, ReadFailed):
                return 0.0
            if head is not None and head.client_id == self._client_id:
                head = None  # counted from 0, when nothing before it could be read
            self._earlier_seconds = head.run_seconds if head is not None else 0.0
        return self._earlier_seconds
