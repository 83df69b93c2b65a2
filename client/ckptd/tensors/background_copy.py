# ruff: noqa: TID253
"""A copy that runs beside the training: a thread of its own, batch by batch, until a step needs the tensors.

Whoever has to wait takes over what is left, with all the threads there are. The thread's priority is not lowered: that
spared the passes beside it nothing, and left more to the step; on busy CPUs it would be stopped holding Python's lock.

The order of locks: a writer's, then a copy's or the step gate's; nobody takes a writer's while holding one of these. So
whoever holds a writer's lock may wait for a copy. The thread that copies takes no writer's lock, ever: to seal the slot,
which needs it, is for another thread, which nobody waits for.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import torch

from ckptd.errors import TimedOut
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.tensors.copy_threads import CopyThreads
from ckptd.tensors.copying import copy_tensors
from ckptd.tensors.device_copy import DeviceCopy

__all__ = ["BackgroundCopy", "Batch", "CopyThread", "batches"]

#: What the thread copies at a time: a step waits for one batch at most before it takes over.
BATCH_BYTES: Final = 8 * 1024 * 1024

#: A thread that waits for others looks so often: Ctrl-C may have cost the notice.
_LOOK_EVERY_S: Final = 1.0

Thing = TypeVar("Thing")
Batch: TypeAlias = list[tuple[TensorSpec, torch.Tensor]]


class BackgroundCopy:
    """The copy of some tensors into one slot; a CopyThread runs it.

    Args:
        given: What to copy from the host's memory.
        devices: What is under way from devices already.
        memory: Where to.
        threads: Who helps whoever waits.
        ended: Called once when every byte has arrived or one can't, `error` says which, in the thread that found it:
            it may hold any lock, so this must take no writer's.

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
        self._copying: set[int] = set()  # threads in the middle of a batch
        self._arrived = threading.Event()

    def __repr__(self) -> str:
        return f"<BackgroundCopy {len(self._left)} batches left, {'ended' if self._arrived.is_set() else 'under way'}>"

    @property
    def has_ended(self) -> bool:
        """Whether every byte has arrived, or one can't."""
        return self._arrived.is_set()

    def let_go(self) -> None:
        """Return when nothing on the host reads the tensors any more, and what this thread's streams do next to them
        comes after what reads them on devices.

        Raises:
            TimedOut: See `wait`.
        """
        self._free()
        for device in self._devices:
            device.order()

    @property
    def interrupted_here(self) -> bool:
        """Whether this call interrupts it in its own thread, as a signal's handler does: it can't end before that."""
        return threading.get_ident() in self._copying

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when every byte has arrived, or one can't; False when that took longer.

        Without a bound (None) it does all that is left itself, and waits for nothing but batches in the middle of being
        copied: the copy's own thread may be gone, or never get a CPU.

        Raises:
            TimedOut: The call interrupts this copy.
        """
        self._check_not_interrupted()
        if timeout_s is None:
            self._finish()
        return self._arrived.wait(timeout_s)

    def run(self) -> None:
        """Copy everything; of the thread that copies."""
        with contextlib.suppress(BaseException):  # it is in `error`; there is no caller here
            while self._copy(1, None):
                pass
        self._finish()

    # --- inside ----------------------------------------------------------------------------------

    def _check_not_interrupted(self) -> None:
        if self.interrupted_here:
            raise TimedOut(
                "the snapshot before is being copied in this thread, by what this call interrupts",
                todo="call it once that goes on: let a signal's handler set a flag, and the loop save",
            )

    def _free(self) -> None:
        """Copy what is left, and wait for who copies the rest."""
        self._check_not_interrupted()
        self._copy(None, self._threads)
        with self._changed:
            while self._copying:
                self._changed.wait(_LOOK_EVERY_S)

    def _finish(self) -> None:
        self._free()
        # After an error too: what they read must stay until they are through.
        for device in self._devices:
            try:
                device.wait()
            except Exception as error:  # noqa: BLE001 - it is the copy's
                self.error = error
        self._end()

    def _end(self) -> None:
        with self._changed:
            if self.error is not None:
                self.error = self.error.with_traceback(None)  # its frames hold tensors and memory
            self._devices, self._memory, self._threads = (), memoryview(b""), None
            tell, self._tell = self._tell, _nobody
            self._arrived.set()
        tell(self)

    def _copy(self, count: int | None, threads: CopyThreads | None) -> bool:
        """Copy so many of the batches that are left, None for all; False when there is none."""
        here = threading.get_ident()
        try:
            pairs = self._take(count, here)
            if pairs:
                copy_tensors(
                    [row for row, _ in pairs], [source for _, source in pairs], self._memory, threads
                )
        except BaseException as error:
            self.error = error
            self._left.clear()
            if not isinstance(error, Exception):  # a Ctrl-C of whoever waits is theirs too
                raise
            return False
        finally:
            self._copying.discard(here)
            with self._changed:
                self._changed.notify_all()
        return bool(pairs)

    def _take(self, count: int | None, here: int) -> Batch:
        with self._changed:
            if self._left:
                self._copying.add(here)
            count = len(self._left) if count is None else min(count, len(self._left))
            return [pair for _ in range(count) for pair in self._left.popleft()]


class CopyThread:
    """One thread for the life of a client, from its first copy on: to start one for each would hold the trainer up.

    A second one does what follows a copy and may have to wait for a lock. Nobody waits for that one, and so whoever
    waits for a copy may hold any lock.
    """

    def __init__(self) -> None:
        self._copying: _Asked[BackgroundCopy] = _Asked("ckptd-overlap", _copy_all)
        self._following: _Asked[Callable[[], None]] = _Asked("ckptd-sealing", _call_all)

    def begin(self, copy: BackgroundCopy) -> None:
        """Have it run `copy`; where the system gives no thread, all is copied here."""
        if not (self._following.start() and self._copying.start()):
            return copy.run()
        self._copying.put(copy)
        return None

    def follow(self, done: Callable[[], None]) -> None:
        """Have `done` called, after what was to be called before; by this thread where there is no other."""
        if self._following.started:
            self._following.put(done)
        else:
            done()

    def close(self) -> None:
        """Let both end, after what they were given; waits for nothing."""
        self._copying.close()
        self._following.close()


class _Asked(Generic[Thing]):
    """What one thread is asked to do, and the thread, once there is something."""

    def __init__(self, name: str, serve: Callable[[queue.SimpleQueue[Thing | None]], None]) -> None:
        self.started = False
        self._name, self._serve = name, serve
        self._queue: queue.SimpleQueue[Thing | None] = queue.SimpleQueue()
        self.put = self._queue.put
        self.close = weakref.finalize(self, self._queue.put, None)
        self.close.atexit = False

    def start(self) -> bool:
        """Start the thread unless it runs; False where the system gives none."""
        if not self.started:
            thread = threading.Thread(target=self._serve, args=(self._queue,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self.started = True
        return True


def _copy_all(asked: queue.SimpleQueue[BackgroundCopy | None]) -> None:
    while (copy := asked.get()) is not None:
        copy.run()
        del copy  # nothing of it stays while this thread waits for the next


def _call_all(asked: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (done := asked.get()) is not None:
        done()
        del done


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
