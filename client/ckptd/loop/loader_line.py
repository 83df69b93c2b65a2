# ruff: noqa: TID253
"""What a sampler draws on the way: a line of its own, so that running it alone gives the same order again.

Between two of its steps a training loop or a dataset may draw from the generators that it draws from. With workers the
steps are taken ahead too, so when such a draw comes in between depends on prefetching.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from ckptd.loop.loader_attributes import walk
from ckptd.loop.loader_memory import Memory
from ckptd.loop.loader_pass import Pass
from ckptd.loop.loader_rng import (
    GeneratorState,
    OwnGenerator,
    is_generator,
    kind_of,
    read_generator,
    set_generator,
)
from ckptd.loop.loader_streams import Streams
from ckptd.loop.loader_torchs import TORCHS_SAMPLERS

#: Those that draw in `iter()` or their first step only, or nothing; the steps of these cost no more.
_AT_ONCE: Final = TORCHS_SAMPLERS - {BatchSampler, RandomSampler} | {
    _InfiniteConstantSampler,
    list,
    range,
    tuple,
}


class Line:
    """Lets a sampler draw from its second step on from where its own step before left every generator it may hold.

    The first draws from them as they stand, and moves them, as with any DataLoader. Later ones have global generators
    of their own. What else a generator gave in between doesn't count for the sampler, and is as it was after the
    step; where nobody else drew from it, the step moves it. It goes by where they are: another generator in the place of one
    is as if that one was reseeded.

    Args:
        sampler: The sampler or batch sampler.
        memory: Of the objects around the loader, for their generators.
        streams: The global generators of the later steps; None where the sampler draws from what it holds only.
    """

    def __init__(self, sampler: Any, memory: Memory, streams: Streams | None) -> None:
        self._memory, self._streams = memory, streams
        self._shared = _reached(sampler, memory.live(fetched=True))
        self._left: dict[str, GeneratorState] | None = None

    def step(self, indices: Iterator[Any]) -> Any:
        """What the sampler's iterator gives next."""
        outside = self._recall()
        try:
            with self._apart():
                return next(indices)
        finally:
            self._left = {path: state for path, (_, state) in self._stand().items()}
            for generator, state in outside:
                set_generator(generator, state)

    def apart(self) -> list[str]:
        """The paths of the generators that aren't where the sampler's last step left them: others draw from them too."""
        left = self._left or {}
        return sorted(path for path, (_, state) in self._stand().items() if left.get(path, state) != state)

    def _apart(self) -> AbstractContextManager[None]:
        return self._streams() if self._streams is not None and self._left is not None else nullcontext()

    def _recall(self) -> list[tuple[OwnGenerator, GeneratorState]]:
        """Set the generators that moved since the step before to where it left them; where they were found."""
        left, moved = self._left or {}, []
        for path, (generator, found) in self._stand().items() if left else ():
            wanted = left.get(path, found)
            if wanted != found and kind_of(wanted) == kind_of(found):
                set_generator(generator, wanted)
                moved.append((generator, found))
        return moved

    def _stand(self) -> dict[str, tuple[OwnGenerator, GeneratorState]]:
        generators = {**self._shared, **self._memory.live(fetched=False)}
        return {path: (one, read_generator(one)) for path, one in generators.items()}


def _reached(sampler: Any, generators: dict[str, OwnGenerator]) -> dict[str, OwnGenerator]:
    """Those of the dataset's generators that the sampler holds too: to read all of them at each step would cost more."""
    if not generators:
        return {}
    holders, whole = walk({"sampler": sampler})
    held = {id(value) for holder in holders for _, value in holder.items() if is_generator(value)}
    return {path: one for path, one in generators.items() if not whole or id(one) in held}


def line_of(sampler: Any, of: Pass, memory: Memory) -> Line | None:
    """The line of a sampler or batch sampler in a pass; None where it draws nothing after its first step."""
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    generator = sampler.generator if type(sampler) is RandomSampler else None
    if not of.line or type(sampler) in _AT_ONCE or (type(sampler) is RandomSampler and generator is None):
        return None
    return Line(sampler, memory, Streams(of.start, of.epoch, "sampler") if generator is None else None)
