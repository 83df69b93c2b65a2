"""One pass over the data: how far it has come, and what is needed to come there again."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ckptd.loop.loader_contents import Held
from ckptd.loop.loader_memory import Glimpse, Memory, Record, is_fetched
from ckptd.loop.loader_proof import Proof
from ckptd.loop.loader_streams import Streams
from ckptd.loop.loader_watch import Watch
from ckptd.loop.loader_worker import Shipped, merge

HERE: Final = -1  #: not in a worker
_SPELLED: Final = frozenset({int, str, float, bool, bytes, type(None)})


@dataclass(eq=False)
class Pass:
    """A pass and its position.

    Attributes:
        start: Everything's memory just before `iter()`.
        kind: Batch size, length and so on of the loader then.
        epoch: Which pass over the data it is, from 0.
        birth: Whether persistent workers were started for this pass.
        first: The generators before the sampler's first step (or the first batch); None before it.
        batches: Yielded.
        steps: Batches of the sampler that are done with: yielded, or raised an error instead.
        check: A check number over their indices.
        pending: The check number after each batch that was given to be fetched and isn't done with.
        workers: Each worker's memory after its last batch that was yielded; None before it is known.
        workers_at_start: Each worker's memory before the pass; None where they start anew.
        greetings: Answers of workers that are to come before the first batch.
        watch: Watches what works in this process: samplers, without workers the dataset too.
        changed: By worker, and of this process: the attributes that are changed and that the memory lacks.
        last: The generators before the last fetch, and
        after: after it; both only while fetching here changes what the memory lacks.
        loop_draws: Whether the training loop was seen to draw from them between two fetches, or may have.
        proofs: Of the batches yielded last, one of each worker.
        before: What the fetch under way began with.
        exhausted: Whether an iterable dataset came to its end.
        over: Whether it came to its end.
        streams: The global generators of the fetches; None where they draw from the process's.
        held: The containers that samplers hold as far as their own steps go.
        apart: Gives the paths of generators that others than the sampler drew from; None where it draws all at once.
        line: Whether what the sampler draws on the way is a line of its own; not in positions of before.
    """

    start: Record
    kind: dict[str, Any]
    birth: bool
    epoch: int = 0
    first: Record | None = None
    batches: int = 0
    steps: int = 0
    check: int = 0
    pending: deque[int] = field(default_factory=deque)
    workers: list[Record | None] | None = None
    workers_at_start: list[Record | None] | None = None
    greetings: int = 0
    watch: Watch | None = None
    changed: dict[int, list[str]] = field(default_factory=dict)
    last: Record | None = None
    after: Record | None = None
    loop_draws: bool = False
    proofs: deque[Proof] = field(default_factory=lambda: deque(maxlen=1))
    before: Glimpse | None = None
    exhausted: bool = False
    over: bool = False
    streams: Streams | None = None
    held: Held = field(default_factory=dict)
    apart: Callable[[], list[str]] | None = None
    line: bool = True
    _ahead: int = 0

    def took(self, index: Any) -> None:
        """The sampler gave a batch to be fetched."""
        self._ahead = fold(self._ahead, index)
        self.pending.append(self._ahead)

    def skipped(self, index: Any) -> None:
        """The sampler gave one that was fetched before."""
        self._ahead = self.check = fold(self._ahead, index)

    def holds(self, before: Held, after: Held) -> None:
        """A step of the sampler began and ended with these containers; what another replaced before isn't its own."""
        new = {spot: value for spot, value in after.items() if value is not before.get(spot)}
        self.held = {**before, **self.held, **new}

    def before_fetch(self, memory: Memory) -> None:
        """Note what it begins with, and, where fetching has to be repeated, what it draws from: the training loop may
        draw from it too."""
        self.before = memory.glimpse()
        if self.repeats:
            self.last = self.before.draws() if self.before is not None else memory.draws()
            if self.after is not None and self.after != self.last:
                self.loop_draws = True

    def after_fetch(self, memory: Memory) -> None:
        if self.watch is not None and self.steps == 1:
            self.changed[HERE] = self.watch.look()
        if self.repeats:
            self.after = memory.draws()

    def done(self) -> None:
        """The oldest batch given to be fetched was yielded, or raised an error."""
        self.steps += 1
        if self.pending:
            self.check = self.pending.popleft()

    def yielded(self, proof: Proof, *, prefetched: bool) -> None:
        """A batch reached the training loop."""
        while len(self.pending) > 1 and not prefetched:
            self.done()  # An interrupted one is left behind.
        self.done()
        self.batches += 1
        self.proofs.append(proof)

    def failed(self) -> None:
        """next() raised an error of the batch that was to come, if one was."""
        self.proofs.clear()
        if self.pending:
            self.done()

    def hear(self, shipped: Shipped) -> None:
        """Keep what a worker sent along."""
        if self.workers is None:
            return
        if shipped.greeting:
            self.workers[shipped.worker] = shipped.memory
            if self.workers_at_start is not None and self.workers_at_start[shipped.worker] is None:
                self.workers_at_start[shipped.worker] = shipped.memory  # a resumed pass knows it already
        else:
            self.workers[shipped.worker] = merge(self.workers[shipped.worker] or {}, shipped.memory)
            self.changed[shipped.worker] = list(shipped.changed)

    @property
    def repeats(self) -> bool:
        """Whether the last fetch may have to be repeated with the generators that it drew from."""
        return self.streams is None and any(map(is_fetched, self.changed.get(HERE, ())))

    def look(self, *, again: bool = False, read: bool = False) -> list[str]:
        """The paths of attributes that were changed, which isn't recorded; read: as for Watch.look."""
        if self.watch is not None and (again or self.steps != 1):  # after the first it has looked
            self.changed[HERE] = self.watch.look(read=read)
            # One that begins later: whether the loop drew before isn't known.
            if self.repeats and self.after is None:
                self.loop_draws = True
        return sorted({path for paths in self.changed.values() for path in paths})

    def left(self, *, workers: bool) -> set[str]:
        """Those of them that stay changed after the pass, as the workers do or don't."""
        self.look(again=True)
        return {path for at, paths in self.changed.items() if workers or at == HERE for path in paths}


def fold(check: int, index: Any) -> int:
    """A running check number over the indices given so far; of an unknown kind of index, its name alone."""
    return zlib.crc32(repr(_spelled(index)).encode("utf-8", "backslashreplace"), check)


def _spelled(index: Any) -> Any:
    kind = type(index)
    if kind in _SPELLED or (kind is list and _SPELLED.issuperset(map(type, index))):
        return index
    if isinstance(index, (list, tuple)):
        parts = list(map(_spelled, index))
        return parts if isinstance(index, list) else tuple(parts)
    if isinstance(index, dict):
        return [(_spelled(name), _spelled(value)) for name, value in index.items()]
    if isinstance(index, (set, frozenset)):
        return sorted(map(repr, map(_spelled, index)))
    as_plain = getattr(index, "tolist", None)  # a number, array or tensor
    return _spelled(as_plain()) if callable(as_plain) else kind.__qualname__
