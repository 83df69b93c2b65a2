# ruff: noqa: TID253
"""What runs in a DataLoader's worker processes: it sends the worker's memory along with each batch.

A worker's generators go on from batch to batch, out of the main process's reach. So each batch carries what has
changed in the worker's memory; the position keeps the newest of each worker that was *yielded*; and a worker
of a resumed run gets it back before its first batch. Only the DataLoader's public hooks are used: collate_fn,
worker_init_fn and the dataset's `__getitems__`. All classes can be pickled, for the spawn start method.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from ckptd.loop.loader_fingerprint import fingerprint
from ckptd.loop.loader_memory import Memory, Record
from ckptd.loop.loader_watch import Watch
from ckptd.snapshot.values import SCALARS

_LOOK_EVERY_S: Final = 1.0


class Greeting:
    """A task that asks a worker for its memory before it has fetched anything; it is answered with no batch."""


class Indexed:
    """A dataset that takes attributes, around one that doesn't: a list, a tuple."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def show(self, info: Any) -> None:
        """Let a worker's own see the dataset itself, as with any DataLoader."""
        object.__setattr__(info, "dataset", self._dataset)  # an older one takes no attributes


class Shipped(NamedTuple):
    """A batch on its way from a worker; a tuple with names, so that pin_memory reaches the batch inside.

    Attributes:
        batch: What collate_fn gave; None in answer to a Greeting.
        worker: The worker's number.
        memory: What is new in its memory since what it sent before; all of it in answer to a Greeting.
        changed: The attributes that fetching changes and the memory lacks.
        greeting: Whether this answers a Greeting.
        print: The batch's fingerprint.
        error: What was raised in place of a batch.
    """

    batch: Any
    worker: int
    memory: Record
    changed: list[str]
    greeting: bool
    print: int | None = None
    error: ExceptionWrapper | None = None


class WorkerStart:
    """A worker_init_fn: the user's own, then the memory of a worker of the run before, if there is one.

    Args:
        init: The user's worker_init_fn, or None.
        collate: The DataLoader's collate_fn.
        batched: Whether the DataLoader makes batches (batch_size isn't None).
        iterable: Whether the dataset is an IterableDataset.
        memories: One per worker, or None to let each start anew.
        opened: Whether a worker has opened before what it opens at its first fetch, by worker.
        after: By worker: the memory that it is given after its first batch.
    """

    def __init__(
        self, init: Callable[[int], None] | None, collate: Callable[[Any], Any], *,
        batched: bool, iterable: bool, memories: list[Record] | None, opened: list[bool] | None,
        after: Mapping[int, Record],
    ) -> None:  # fmt: skip
        self._init, self._collate, self._batched = init, collate, batched
        self._iterable, self._memories, self._opened, self._after = iterable, memories, opened, after

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_with_the_parent, args=(os.getppid(),), daemon=True).start()
        info: Any = get_worker_info()
        dataset = info.dataset if info is not None else None
        if isinstance(dataset, Indexed):
            dataset.show(info)
        if self._init is not None:
            self._init(worker)
        memory = Memory({"dataset": dataset, "collate_fn": self._collate})
        if self._memories is not None:
            memory.put(self._memories[worker])
        global _here
        _here = _Worker(
            worker, dataset, memory, batched=self._batched, after=self._after.get(worker),
            opened=self._opened is not None and self._opened[worker]
        )  # fmt: skip
        if self._iterable:
            _greet(dataset)
        else:
            object.__setattr__(dataset, "__getitems__", _here.fetch)


class ShippingCollate:
    """A collate_fn: the user's own, and the worker's memory after it."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, data: Any) -> Any:
        if _here is None:  # not in a worker of ours
            return self._collate(data)
        return _here.ship(self._collate, data)


class _Worker:
    def __init__(
        self, number: int, dataset: Any, memory: Memory, *, batched: bool, opened: bool, after: Record | None
    ) -> None:
        self._opened = opened
        self._number, self._dataset, self._memory, self._batched = number, dataset, memory, batched
        self._getitems = getattr(dataset, "__getitems__", None)
        self._before: Record = {}
        self._after = after
        self._sent: Record = {}
        self._watch = Watch(memory)
        self._inside = False

    def fetch(self, index: Any) -> Any:
        """As torch's fetcher does, after a Greeting aside."""
        if isinstance(index, Greeting):
            self.begin()
            return index
        if self._inside:  # A __getitem__ may be made of the dataset's own __getitems__.
            return self._samples(index)
        self._inside = True
        try:
            if self._batched:
                return self._samples(index)
            return self._dataset[index]
        except Exception:  # noqa: BLE001 - raised in the trainer
            return self._error()
        finally:
            self._inside = False

    def _samples(self, index: Any) -> Any:
        if self._getitems:
            return self._getitems(index)
        return [self._dataset[one] for one in index]

    def _error(self) -> ExceptionWrapper:
        """The error being handled, as torch sends it; but after it the memory is another, which goes with it."""
        return ExceptionWrapper(where=f"in DataLoader worker process {self._number}")  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A pass begins: take the memory as it is before anything is fetched."""
        self._before, self._watch = self._memory.all(), Watch(self._memory, opened=self._opened)
        self._opened = True

    def ship(self, collate: Callable[[Any], Any], data: Any) -> Shipped:
        first = data[0] if isinstance(data, list) and len(data) == 1 else data
        if isinstance(first, Greeting):
            self._sent = self._before
            return Shipped(None, self._number, self._before, [], True)
        batch, error = None, data if isinstance(data, ExceptionWrapper) else None
        try:
            batch = collate(data) if error is None else None
        except Exception:  # noqa: BLE001 - raised in the trainer
            error = self._error()
        if self._after is not None:
            self._memory.put(self._after, states=False)
            self._after = None
        now = self._memory.all()
        news = _changes(self._sent, now)
        self._sent = now
        return Shipped(batch, self._number, news, self._watch.look(), False, fingerprint(batch), error)


_here: _Worker | None = None


def _end_with_the_parent(parent: int) -> None:
    """End this process when its parent is gone, as torch's worker loop does when it comes to look.

    What is sent along fills the pipe to the trainer; a worker that waits for room there never looks.
    """
    trainer = multiprocessing.parent_process()  # not the parent where a fork server is
    while os.getppid() == parent and (trainer is None or trainer.is_alive()):
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _changes(before: Record, now: Record) -> Record:
    """By generator; plain attributes and state_dicts, which are small, as a whole if any changed."""
    news: Record = {}
    for part, entries in now.items():
        old = before.get(part, {})
        if part in ("values", "states"):
            if not _same(entries, old):
                news[part] = entries
        else:
            new = {name: state for name, state in entries.items() if old.get(name) != state}
            if new:
                news[part] = new
    return news


def _same(one: Any, other: Any) -> bool:
    """Whether two state_dicts are equal; what can't be compared isn't."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(
            one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        )
    return one is other or (type(one) in SCALARS and bool(one == other))


def merge(memory: Record, news: Record) -> Record:
    """A worker's memory with what a batch brought."""
    merged = dict(memory)
    for part, entries in news.items():
        merged[part] = entries if part in ("values", "states") else {**memory.get(part, {}), **entries}
    return merged


def _greet(dataset: Any) -> None:
    """Let its iterators give a Greeting before their first sample; its class is this process's own."""
    kind: Any = type(dataset)
    iterate = kind.__iter__

    def __iter__(self: Any) -> Iterator[Any]:
        if self is not dataset or _here is None:
            return iter(iterate(self))
        _here.begin()
        return _Greeted(iter(iterate(self)))

    kind.__iter__ = __iter__


class _Greeted(Iterator[Any]):
    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples, self._greeting = samples, True

    def __next__(self) -> Any:
        if self._greeting:
            self._greeting = False
            return Greeting()
        return next(self._samples)
