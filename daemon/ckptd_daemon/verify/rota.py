"""When each checkpoint is re-read though nothing about it has changed. Pure.

Rot beneath a file system changes neither inode nor size nor times. So each is read in full again after half of the
period at the earliest and at its end at the latest: when in between is drawn by its name, so that many that were read
in one burst don't come due in one, and a restart draws the same.

What must be true of it:
- Who was read when is known by its mark, whose time is the wall clock's. A time that can't be, in the future or before
  all clocks, is none: then it is due at once. A clock that jumps costs a re-read, and puts none off.
- Within one process time is monotonic.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from ckptd.errors import InvalidArgument
from ckptd_daemon.verify.backlog import Key

DEFAULT_EVERY_S: Final = 7 * 86_400
#: Sooner is refused: the disk would do nothing else. Longer isn't a period any more.
SHORTEST_S: Final = 3_600
_LONGEST_S: Final = 10 * 366 * 86_400
_EARLIEST: Final = 0.5  #: of the period
_FEW: Final = 64


def check_every(value: Any, where: str) -> int:
    """A period of the scrub in seconds, as given; 0 for never. None is the default.

    Raises:
        InvalidArgument: No such period.
    """
    if value is None:
        return DEFAULT_EVERY_S
    if type(value) is not int or not (value == 0 or SHORTEST_S <= value <= _LONGEST_S):
        raise InvalidArgument(
            "not a period of the scrub", where=where, seen=repr(value)[:100],
            wanted=f"seconds from {SHORTEST_S} (1h) to {_LONGEST_S} (ten years), or 0 for never",
        )  # fmt: skip
    return value


def age_s(verified_at: float, now: float) -> float | None:
    """How long ago by the wall clock; None when that can't be told."""
    return now - verified_at if 0 < verified_at <= now else None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far the scrub is.

    Attributes:
        checkpoints: How many it goes through.
        due: How many of them wait to be read.
        late: How many weren't read within the period, or nobody knows when.
        oldest_s: Seconds since the one was read that has waited longest; None when there is none or nobody knows.
        next_s: Seconds until one is due; None without any.
    """

    checkpoints: int
    due: int
    late: int
    oldest_s: float | None
    next_s: float | None


class Rota:
    """Who is next; not thread-safe.

    Args:
        every_s: The period in seconds.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._read_at: dict[Key, float | None] = {}
        self._due_at: dict[Key, float] = {}
        self._soonest: list[tuple[float, Key]] = []  # a heap; one that isn't due then any more is passed over

    def __repr__(self) -> str:
        return f"<Rota every {self._every_s:g} s, {len(self._read_at)} checkpoints>"

    def read(self, key: Key, now: float, *, age_s: float | None = 0.0) -> None:
        """It was read in full so many seconds ago; None: nobody knows when."""
        self._read_at[key] = None if age_s is None else now - age_s
        self._is_due(key, now if age_s is None else now - age_s + self._every_s * _share(key))

    def put_off(self, key: Key, until: float) -> None:
        """Not before then, whenever it was read."""
        if key in self._due_at:
            self._is_due(key, until)

    def forget(self, key: Key) -> None:
        """It is gone."""
        self._read_at.pop(key, None)
        self._due_at.pop(key, None)

    def listed(self, run: str, names: Collection[str]) -> None:
        """These are all there are in the run."""
        for key in [key for key in self._read_at if key[0] == run and key[1] not in names]:
            self.forget(key)

    def next(self, now: float) -> Key | None:
        """The one that has been due for longest; None while there is none."""
        first = self._first()
        return first[1] if first is not None and first[0] <= now else None

    def due_in(self, now: float) -> float | None:
        """Seconds until `next` has one; None when it never will by itself."""
        first = self._first()
        return None if first is None else max(0.0, first[0] - now)

    def _is_due(self, key: Key, at: float) -> None:
        self._due_at[key] = at
        heapq.heappush(self._soonest, (at, key))
        if len(self._soonest) > 2 * len(self._due_at) + _FEW:  # mostly passed over
            self._soonest = [(due_at, one) for one, due_at in self._due_at.items()]
            heapq.heapify(self._soonest)

    def _first(self) -> tuple[float, Key] | None:
        while self._soonest and self._due_at.get(self._soonest[0][1]) != self._soonest[0][0]:
            heapq.heappop(self._soonest)
        return self._soonest[0] if self._soonest else None

    def standing(self, now: float) -> Standing:
        """See there."""
        ages = [None if at is None else now - at for at in self._read_at.values()]
        known = [age for age in ages if age is not None]
        return Standing(
            checkpoints=len(ages), due=sum(at <= now for at in self._due_at.values()),
            late=sum(age is None or age > self._every_s for age in ages),
            oldest_s=max(known) if known and len(known) == len(ages) else None, next_s=self.due_in(now),
        )  # fmt: skip


def _share(key: Key) -> float:
    """Of the period: evenly from _EARLIEST to 1 over all names."""
    drawn = int.from_bytes(hashlib.sha256("/".join(key).encode()).digest()[:4]) / 2**32
    return _EARLIEST + (1 - _EARLIEST) * drawn
