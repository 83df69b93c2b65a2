"""The sampler's side of a pass: the order of the samples, watched, and skipped to the position."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptd.errors import StateMismatch
from ckptd.loop.loader_line import line_of
from ckptd.loop.loader_memory import Memory, Record
from ckptd.loop.loader_pass import Pass


@dataclass
class Beginning:
    """How the next pass over the sampler begins.

    Attributes:
        of: The pass.
        greetings: Tasks for the workers that come before the first batch, dealt out in turn.
        skip: Batches to leave out.
        first: The generators to set before the first step; None to leave them as they are, and note them.
        rewind: The memory to put back before the first step, for the sampler's `iter()` to be called once more;
            None to take the steps of the one that torch calls.
    """

    of: Pass
    greetings: int = 0
    skip: int = 0
    first: Record | None = None
    rewind: Record | None = None


class Order:
    """Stands in for a sampler or batch sampler, and gives what it gives.

    Attributes:
        beginning: For the next `iter()`.
        steps: The newest iterator; None before the first.
    """

    def __init__(self, sampler: Any, memory: Memory, greeting: Any) -> None:
        self.sampler, self.memory, self.greeting = sampler, memory, greeting
        self.beginning: Beginning | None = None
        self.steps: Steps | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.beginning is None:
            return iter(self.sampler)
        self.steps = Steps(self, self.beginning)
        return self.steps

    def __len__(self) -> int:
        return len(self.sampler)


class Steps(Iterator[Any]):
    """One pass over the sampler."""

    def __init__(self, order: Order, beginning: Beginning) -> None:
        self._order, self._beginning = order, beginning
        self._greetings = beginning.greetings
        # With rewind too, though only ready() takes its steps: it may draw here, before torch seeds the workers.
        self._indices: Iterator[Any] = iter(order.sampler)
        self._line = line_of(order.sampler, beginning.of, order.memory)
        beginning.of.apart = self._line.apart if self._line is not None else None
        self._ready = False
        self._held: list[Any] = []

    def __next__(self) -> Any:
        if self._greetings:
            self._greetings -= 1
            return self._order.greeting
        self.ready()
        index = self._held.pop() if self._held else self._step()
        self._beginning.of.took(index)
        return index

    def begin(self) -> None:
        """Take the first step now, as it would be taken in `iter()` if no greeting came before."""
        if not self._ready:
            self.ready()
            with contextlib.suppress(StopIteration):  # It comes once more.
                self._held = [self._step()]

    def _step(self) -> Any:
        if self._line is None:
            return next(self._indices)
        before = self._order.memory.held()
        try:
            return self._line.step(self._indices)
        finally:
            self._beginning.of.holds(before, self._order.memory.held())

    def ready(self) -> None:
        """Come to the position."""
        begin, memory = self._beginning, self._order.memory
        if not self._ready:
            self._ready = True
            if begin.rewind is not None:
                memory.put(begin.rewind)
                self._indices = iter(self._order.sampler)
            if begin.first is None:
                begin.of.first = memory.draws()
            else:
                memory.put(begin.first)
            self._skip()

    def _skip(self) -> None:
        """Leave batches out."""
        begin = self._beginning
        for step in range(begin.skip):
            try:
                begin.of.skipped(self._step())
            except StopIteration:
                raise StateMismatch(
                    "the loader ends before the position", where="loader", seen=f"{step} batches",
                    wanted=f"{begin.skip} or more", todo="restore with the dataset and batch size of the checkpoint",
                ) from None  # fmt: skip
