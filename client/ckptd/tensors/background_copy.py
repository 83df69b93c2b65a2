# ruff: noqa: TID253
"""A copy that runs beside the training: a thread of its own, batch by batch, until a step needs the tensors.

Whoever has to wait takes over what is left, with all the threads there are. The thread's priority is not lowered: that
spared the passes beside it nothing, and left more to the step; on busy CPUs it would be stopped holding Python's lock.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import torch

from ckptd.snapshot.descriptor import TensorSpec
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.copying import copy_tensors
from ckptd.tensors.device_copy import DeviceCopy

__all__ = ["BackgroundCopy", "Batch", "CopyThread", "batches"]

#: What the thread copies at a time: a step waits for one batch at most before it takes over.
BATCH_BYTES: Final = 8 * 1024 * 1024

Batch: TypeAlias = list[tuple[TensorSpec, torch.Tensor]]


class BackgroundCopy:
    """The copy of some tensors into one slot; a CopyThread runs it.

    Args:
        given: What to copy from the host's memory.
        devices: What is under way from devices already.
        memory: Where to.
        threads: Who helps whoever waits.
        ended: Called once, in the thread, when every byte has arrived or one can't: `error` says which.

    Attributes:
        error: Why it failed; None while it hasn't.
    """

    def __init__(
        self, given: Batch, devices: Sequence[DeviceCopy], memory: memoryview, *,
        threads: CopyThreads | None, ended: Callable[[BackgroundCopy], None],
    ) -> None:  # fmt: skip
        self.error: BaseException | None = None
        self._left: deque[Batch] = deque(batches(given))
        self._devices, self._memory = devices, memory
        self._threads, self._tell = threads, ended
        self._changed = threading.Condition()
        self._copying = 0  # threads in the middle of a batch
        self._arrived = threading.Event()

    def __repr__(self) -> str:
        return f"<BackgroundCopy {len(self._left)} batches left, {'ended' if self._arrived.is_set() else 'under way'}>"

    @property
    def has_ended(self) -> bool:
        """Whether every byte has arrived, or one can't."""
        return self._arrived.is_set()

    def let_go(self) -> None:
        """Return when nothing on the host reads the tensors any more, and what this thread's streams do next to them
        comes after what reads them on devices."""
        self._free()
        for device in self._devices:
            device.order()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when every byte has arrived, or one can't; False when that took longer.

        Without a bound (None) it helps: what it has taken over it could not leave in time.
        """
        if timeout_s is None:
            self._free()
        return self._arrived.wait(timeout_s)

    def run(self) -> None:
        """Copy everything; of the thread that copies."""
        try:
            while (batch := self._take()) is not None:
                self._copy(batch, None)
            self._free()
            # After an error too: what they read must stay until they are through.
            for device in self._devices:
                device.wait()
        except BaseException as error:  # noqa: BLE001 - there is no caller here; whoever waits is told
            self.error = error
        finally:
            self._left.clear()
            if self.error is not None:
                self.error = self.error.with_traceback(None)  # its frames hold tensors and memory
            self._devices, self._memory, self._threads = (), memoryview(b""), None
            self._arrived.set()
            tell, self._tell = self._tell, _nobody
            tell(self)

    # --- inside ----------------------------------------------------------------------------------

    def _free(self) -> None:
        """Copy what is left, and wait for who copies the rest."""
        with self._changed:
            rest = [pair for batch in self._left for pair in batch]
            self._left.clear()
            self._copying += bool(rest)
        if rest:
            self._copy(rest, self._threads)
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)

    def _take(self) -> Batch | None:
        with self._changed:
            if not self._left:
                return None
            self._copying += 1
            return self._left.popleft()

    def _copy(self, batch: Batch, threads: CopyThreads | None) -> None:
        try:
            rows, sources = [row for row, _ in batch], [source for _, source in batch]
            copy_tensors(rows, sources, self._memory, threads)
        except BaseException as error:
            self.error = error
            self._left.clear()
            if not isinstance(error, Exception):  # a Ctrl-C of whoever waits is theirs too
                raise
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()


class CopyThread:
    """One thread for the life of a client, from its first copy on: to start one for each would hold the trainer up."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[BackgroundCopy | None] = queue.SimpleQueue()
        self._started = False
        self.close = weakref.finalize(self, self._asked.put, None)  #: Let it end; waits for nothing.
        self.close.atexit = False

    def begin(self, copy: BackgroundCopy) -> None:
        """Have it run `copy`; where the system gives no thread, all is copied here."""
        if not self._started:
            try:
                threading.Thread(
                    target=_serve, args=(self._asked,), name="ckptd-overlap", daemon=True
                ).start()
            except RuntimeError:
                return copy.run()
            self._started = True
        self._asked.put(copy)
        return None


def _serve(asked: queue.SimpleQueue[BackgroundCopy | None]) -> None:
    while (copy := asked.get()) is not None:
        copy.run()
        del copy  # nothing of it stays while this thread waits for the next


def batches(given: Iterable[tuple[TensorSpec, torch.Tensor]]) -> Iterator[Batch]:
    """The pairs in batches of BATCH_BYTES; a larger tensor that is dense in memory is cut."""
    batch: Batch = []
    size = 0
    for row, source in given:
        for part in _parts(row, source):
            if batch and size + part[0].nbytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += part[0].nbytes
    if batch:
        yield batch


def _parts(row: TensorSpec, source: torch.Tensor) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    if row.nbytes <= BATCH_BYTES or not (row.stride is not None or source.is_contiguous()):
        yield row, source
        return
    flat, step = source.as_strided((source.numel(),), (1,)), BATCH_BYTES // row.itemsize
    for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        part = TensorSpec(
            path=row.path, dtype=row.dtype, itemsize=row.itemsize, shape=(len(piece),), stride=None,
            offset=row.offset + start * row.itemsize, nbytes=len(piece) * row.itemsize,
        )  # fmt: skip
        yield part, piece


def _nobody(copy: BackgroundCopy) -> None:
    """It was told."""
