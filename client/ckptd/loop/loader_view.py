# ruff: noqa: TID253
"""A second DataLoader over the same dataset, through which a ResumableLoader iterates.

It is a shallow copy of the user's, of the same class, with stand-ins for the sampler, and with workers for collate_fn
and worker_init_fn. The user's DataLoader isn't changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckptd.loop.loader_memory import Memory, Record
from ckptd.loop.loader_order import Beginning, Order
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_way import Way, has_own_iter, is_iterable
from ckptd.loop.loader_worker import Greeting, Indexed, ShippingCollate, WorkerStart


class View:
    """A DataLoader's stand-in; kept for its life with persistent workers, else for one pass.

    Attributes:
        order: The stand-in of the sampler; None where the order isn't needed to go on.
        reports: Whether workers send their memory along.
    """

    def __init__(self, loader: DataLoader[Any], memory: Memory, way: Way) -> None:
        self._loader = loader
        self._persistent = bool(loader.num_workers and loader.persistent_workers)
        iterable = is_iterable(loader)
        self.reports = (
            loader.num_workers > 0 and (not iterable or self._persistent) and not has_own_iter(loader)
        ) and not memory.too_many
        self.order: Order | None = None
        self._observed: _Observed | None = None
        self._through: DataLoader[Any] = loader
        if has_own_iter(loader):
            return
        self._through = object.__new__(type(loader))
        changes = vars(self._through)
        changes.update(vars(loader))
        changes["_iterator"] = None
        if self.reports or not iterable:
            self._put_order(changes, memory)
        if way.how == "load":
            changes["dataset"] = self._observed = _Observed(loader.dataset)
        if self.reports and not hasattr(loader.dataset, "__dict__"):
            changes["dataset"] = Indexed(loader.dataset)  # a list, a tuple: in a worker it needs a hook

    def _put_order(self, changes: dict[str, Any], memory: Memory) -> None:
        batched = self._loader.batch_sampler is not None
        sampler = self._loader.batch_sampler if batched else self._loader.sampler
        greeting: Any = Greeting()
        if is_iterable(self._loader):
            greeting = [None] if batched else None  # what its sampler gives for one sample
        self.order = Order(sampler, memory, greeting)
        as_batches = batched or (self.reports and not is_iterable(self._loader))  # through `__getitems__`
        changes["batch_sampler" if as_batches else "sampler"] = self.order

    @property
    def born(self) -> bool:
        """Whether persistent workers are there already."""
        return self._persistent and self._through._iterator is not None

    def begin(
        self, beginning: Beginning, memories: list[Record] | None = None, *,
        opened: list[bool] | None = None, after: Mapping[int, Record] | None = None, at_the_end: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """`iter()`, with workers that start with these memories, if they start now.

        Args:
            beginning: How the sampler begins.
            memories: One per worker; None to let each start anew.
            opened: By worker, whether it had opened what it opens at its first fetch.
            after: By worker: the memory that it is given after its first batch.
            at_the_end: Whether an iterable dataset had come to its end; then there is nothing to come.
        """
        if at_the_end:
            return iter(())
        if self.order is not None:
            self.order.beginning = beginning
        if self._observed is not None:
            self._observed.of = beginning.of
        if self.reports:
            self._report(memories, opened, after or {})
        source = iter(self._through)
        if self.reports and self.order is not None and self.order.steps is not None:
            self.order.steps.begin()
        return source

    def _report(
        self, memories: list[Record] | None, opened: list[bool] | None, after: Mapping[int, Record]
    ) -> None:
        loader, changes = self._loader, vars(self._through)
        changes["collate_fn"] = ShippingCollate(loader.collate_fn)
        changes["worker_init_fn"] = WorkerStart(
            loader.worker_init_fn, loader.collate_fn, memories=memories, opened=opened, after=after,
            batched=loader.batch_sampler is not None, iterable=is_iterable(loader),
        )  # fmt: skip
        changes["_IterableDataset_len_called"] = None  # it would count the greetings as samples


class _Observed(IterableDataset[Any]):
    """Notes that an iterable dataset came to its end; without workers only."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.of: Pass | None = None

    def __iter__(self) -> Iterator[Any]:
        noted, samples = self.of, iter(self._dataset)
        return _noting(noted, samples)


def _noting(noted: Pass | None, samples: Iterator[Any]) -> Iterator[Any]:
    yield from samples
    if noted is not None:
        noted.exhausted = True
