# ruff: noqa: TID253
"""What a sampler draws on the way: a line of its own, so that running it alone gives the same order again.

Between two of its steps a training loop or a dataset may draw from the generators that it draws from. With workers the
steps are taken ahead too, so when such a draw comes in between depends on prefetching.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _InfiniteConstantSampler

from ckptd.loop.loader_memory import Memory
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_rng import GeneratorState, OwnGenerator, read_generator, set_generator
from ckptd.loop.loader_streams import Streams

#: Those that draw in `iter()` or their first step only, or nothing; the steps of these cost no more.
_AT_ONCE: Final = frozenset(
    {
        DistributedSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, _InfiniteConstantSampler,
        list, range, tuple,
    }
)  # fmt: skip


class Line:
    """Lets a sampler draw from its second step on from where its own step before left every generator it may hold.

    The first draws from them as they stand, and moves them, as with any DataLoader. Later ones have global generators
    of their own. What else a generator gave in between doesn't count for the sampler, and is as it was after the
    step; where nobody else drew from it, the step moves it.

    Args:
        memory: Of the objects around the loader, for their generators.
        streams: The global generators of the later steps; None where the sampler draws from what it holds only.
    """

    def __init__(self, memory: Memory, streams: Streams | None) -> None:
        self._memory, self._streams = memory, streams
        self._others = memory.live(fetched=True)
        self._left: dict[int, tuple[OwnGenerator, GeneratorState]] | None = None

    def step(self, indices: Iterator[Any]) -> Any:
        """What the sampler's iterator gives next."""
        outside = self._recall()
        try:
            with self._apart():
                return next(indices)
        finally:
            self._left = self._stand()
            for generator, state in outside:
                set_generator(generator, state)

    def apart(self) -> list[str]:
        """The paths of the generators that aren't where the sampler's last step left them: others draw from them too."""
        left = self._left or {}
        return sorted(
            path for path, one in self._memory.by_path().items()
            if id(one) in left and left[id(one)][1] != read_generator(one)
        )  # fmt: skip

    def _apart(self) -> AbstractContextManager[None]:
        return self._streams() if self._streams is not None and self._left is not None else nullcontext()

    def _recall(self) -> list[tuple[OwnGenerator, GeneratorState]]:
        """Set the generators that moved since the step before to where it left them; where they were found."""
        left, moved = self._left or {}, []
        for number, (generator, found) in self._stand().items() if left else ():
            if number in left and left[number][1] != found:
                set_generator(generator, left[number][1])
                moved.append((generator, found))
        return moved

    def _stand(self) -> dict[int, tuple[OwnGenerator, GeneratorState]]:
        generators = [*self._others, *self._memory.live(fetched=False)]
        return {id(one): (one, read_generator(one)) for one in generators}


def line_of(sampler: Any, of: Pass, memory: Memory) -> Line | None:
    """The line of a sampler or batch sampler in a pass; None where it draws nothing after its first step."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    generator = sampler.generator if type(sampler) is RandomSampler else None
    if not of.line or type(sampler) in _AT_ONCE or (type(sampler) is RandomSampler and generator is None):
        return None
    return Line(memory, Streams(of.start, of.epoch, "sampler") if generator is None else None)
