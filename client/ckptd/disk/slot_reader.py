"""A snapshot that still lies in its slot, read as the checkpoint that it is to become: byte for byte the same files.

They are planned from the descriptor, as the writer plans them, and cut out of the slot where they are read. Their
hashes don't exist yet: the slot's own proof stands for all of them, checked before the first byte is handed out.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from ckptd.disk.entry import read_failed
from ckptd.disk.reader import Span
from ckptd.errors import CorruptCheckpoint, ProtocolError
from ckptd.format.plan import CheckpointPlan, SlotRange, plan_checkpoint
from ckptd.format.records import CheckpointIndex, ShardRecord
from ckptd.names import META_FILE, TABLE_FILE
from ckptd.snapshot.descriptor import Descriptor
from ckptd.snapshot.sealed_slot import SealedSlot

__all__ = ["SlotReader"]


class SlotReader:
    """A ckptd.disk.reader.Reader over a slot. The slot stays the caller's to close.

    Attributes:
        path: The slot's file, for messages.
        index: The index that the checkpoint will have, but for what isn't known yet: parent, line and hashes.
        files: Names of the files of the components asked for.
    """

    def __init__(
        self, slot: SealedSlot, descriptor: Descriptor, *, run_id: str, sequence: int,
        only: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """Plan its files and prove all its bytes.

        Args:
            slot: The slot, proven.
            descriptor: What its descriptor says.
            run_id: The run's.
            sequence: The snapshot's.
            only: Component names; None means all. meta.pt (or ckpt.pt) and tensors.json are always there.

        Raises:
            CorruptCheckpoint: The bytes aren't those that were sealed.
            UnstorableState: No files can be planned.
            ReadFailed: It can't be read now.
        """
        self.path, self._slot = str(slot.path), slot
        plan = plan_checkpoint(descriptor)
        self.index = _index(descriptor, plan, run_id, sequence)
        self._files = {TABLE_FILE: _Segments((plan.table,))}
        for file in plan.files:
            if only is None or plan.layout == "single" or file.component in (*only, "meta"):
                self._files[file.path] = _Segments(file.segments)
        with self._reading():
            slot.check(threads=len(os.sched_getaffinity(0)))

    def __repr__(self) -> str:
        return f"<SlotReader {self.path}>"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(self, name: str) -> bytes:
        """The whole content of a file."""
        content = bytearray(self._files[name].size)
        self.read_into(name, [Span(0, memoryview(content))])
        return bytes(content)

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        """Read a file's spans into their memory. Raises CorruptCheckpoint, ReadFailed: it must not be used then."""
        segments = self._files[name]
        with self._reading():
            for span in spans:
                if span.begin is not None:
                    span.begin()
                for segment, start, into in segments.within(span.offset, span.into.cast("B")):
                    if isinstance(segment, SlotRange):
                        self._slot.read_into(segment.offset + start, into)
                    else:
                        into[:] = segment[start : start + into.nbytes]
                if span.done is not None:
                    span.done()

    peek_into = read_into

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ProtocolError as error:
            raise CorruptCheckpoint(
                error.what, where=self.path, seen=error.seen, wanted=error.wanted
            ) from error
        except OSError as error:
            raise read_failed(error, self.path) from error


class _Segments:
    """A planned file: its segments, and where each begins."""

    def __init__(self, segments: Sequence[bytes | SlotRange]) -> None:
        self._segments = segments
        self._ends = list(accumulate(map(_length, segments)))
        self.size = self._ends[-1] if self._ends else 0

    def within(self, offset: int, into: memoryview) -> Iterator[tuple[bytes | SlotRange, int, memoryview]]:
        """What lies at `offset`, piece by piece: a segment, where in it to begin, the memory for it."""
        at, done = bisect_right(self._ends, offset), 0
        while done < into.nbytes:
            if at == len(self._segments):
                raise ProtocolError("beyond the end of a planned file")
            segment, end = self._segments[at], self._ends[at]
            start = offset + done - (end - _length(segment))
            count = min(into.nbytes - done, end - offset - done)
            yield segment, start, into[done : done + count]
            at, done = at + 1, done + count


def _length(segment: bytes | SlotRange) -> int:
    return segment.nbytes if isinstance(segment, SlotRange) else len(segment)


def _index(d: Descriptor, plan: CheckpointPlan, run_id: str, sequence: int) -> CheckpointIndex:
    meta = next((file for file in plan.files if file.path == META_FILE), None)
    shards = tuple(
        ShardRecord(
            shard=file.shard, component=file.component, path=file.path, bytes=file.size, sha256="",
            num_params=file.num_params,
        )
        for file in plan.files
        if file is not meta
    )  # fmt: skip
    return CheckpointIndex(
        run=d.run, run_id=run_id, client_id=d.client_id, snapshot=d.snapshot, sequence=sequence, parent=None,
        step=d.step, saved_at=d.saved_at, lineage=((sequence, sequence),), run_seconds=d.run_seconds,
        layout=plan.layout, num_shards=len(shards), shards=shards,
        meta_sha256=None, meta_bytes=None if meta is None else meta.size,
        tensors_sha256="", tensors_bytes=len(plan.table), metrics=d.metrics, versions=d.versions,
    )  # fmt: skip
