"""What a pass over the data changes in a loader's objects and their memory lacks: by the marks of attributes."""

from __future__ import annotations

from ckptd.loop.loader_marks import Mark, Marker, is_opened
from ckptd.loop.loader_memory import Memory, Spot


class Watch:
    """Tells what a pass changes that its memory lacks.

    What the first batch opens and nothing changes afterwards (a file, a database) is no such thing.

    Args:
        memory: Of the objects to watch.
        samplers_only: Whether dataset and collate_fn are left out: they work elsewhere.
        opened: Whether what the first batch opens is known to stay.
    """

    def __init__(self, memory: Memory, *, samplers_only: bool = False, opened: bool = False) -> None:
        self._memory, self._samplers_only, self._opened = memory, samplers_only, opened
        self._marker = Marker()
        self._first, self._changed = True, set[str]()
        self._base = self._marks()

    def _marks(self) -> dict[Spot, Mark]:
        return self._memory.marks(self._marker, samplers_only=self._samplers_only)

    def look(self, *, read: bool = False) -> list[str]:
        """The paths of what was changed since the start, in their order.

        read: What samplers keep has just been read, which takes long where it is much.
        """
        if not read:
            self._memory.read_contents()
        now, opened = self._marks(), set()
        if now != self._base:
            changed = {spot for spot in {**self._base, **now} if self._base.get(spot) != now.get(spot)}
            if self._first:
                opened = {spot for spot in changed if is_opened(self._base.get(spot), now.get(spot))}
            self._changed |= {self._memory.at(spot) for spot in changed - opened}
        if self._first:
            self._first, self._base = False, now
        unsure = set() if self._opened else {self._memory.at(spot) for spot in opened}
        return sorted(self._changed | unsure)
