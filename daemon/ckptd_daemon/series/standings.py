"""The candidates of a run in the orders that retention goes by, kept up one by one.

To go through all of a run's checkpoints costs more with each of them; which of them to remove is seen from the ends of
these orders. What must be true: `to_remove` names whom `retention.decide` wouldn't keep, for every series and policy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.retention import Candidate, Verdict, counts, rank, why_removed

_Rank = tuple[float, int, str]


class Standings:
    """Of one run.

    Args:
        candidates: Those there are.
    """

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._all: dict[str, Candidate] = {}
        self._line: list[tuple[int, str]] = []  # those that count, the oldest first
        self._abandoned: dict[str, Candidate] = {}
        self._metric = ("", "")
        self._rated: list[_Rank] = []  # those that count and have that metric, the best first
        for candidate in candidates:
            self.put(candidate)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all.values())

    def put(self, candidate: Candidate) -> None:
        """It is there, or is another one now."""
        self._leave(candidate.name)
        self._all[candidate.name] = candidate
        if counts(candidate):
            insort(self._line, _place(candidate))
            if (rated := rank(candidate, *self._metric)) is not None:
                insort(self._rated, rated)
        elif _is_abandoned(candidate):
            self._abandoned[candidate.name] = candidate

    def drop(self, name: str) -> None:
        """There is none of that name any more."""
        self._leave(name)
        self._all.pop(name, None)

    def newest(self) -> Candidate | None:
        """The newest that counts."""
        return self._all[self._line[-1][1]] if self._line else None

    def best(self, policy: RetentionPolicy) -> list[str]:
        """The names of those that the policy keeps as the best, the best first."""
        if policy.monitor is None or policy.mode is None:
            return []
        if self._metric != (policy.monitor, policy.mode):
            self._metric = policy.monitor, policy.mode
            rated = (rank(self._all[name], *self._metric) for _, name in self._line)
            self._rated = sorted(one for one in rated if one is not None)
        return [name for *_, name in self._rated[: max(1, policy.keep_best)]]

    def to_remove(self, policy: RetentionPolicy, *, unreadable: Sequence[str] = ()) -> list[Verdict]:
        """Those that the policy doesn't keep, the oldest first; nobody while something can't be read now."""
        newest = self.newest()
        if unreadable or newest is None:
            return []
        best = set(self.best(policy))
        beyond = islice(self._line, max(0, len(self._line) - max(1, policy.keep_last)))
        doomed = [self._all[name] for _, name in beyond if name not in best]
        doomed += [one for one in self._abandoned.values() if _place(one)[0] <= _place(newest)[0]]
        return [why_removed(candidate, policy) for candidate in sorted(doomed, key=_place)]

    def _leave(self, name: str) -> None:
        """It leaves its place in each order."""
        if (candidate := self._all.get(name)) is None:
            return
        self._abandoned.pop(name, None)
        if counts(candidate):
            _take(self._line, _place(candidate))
            if (rated := rank(candidate, *self._metric)) is not None:
                _take(self._rated, rated)


def _place(candidate: Candidate) -> tuple[int, str]:
    return -1 if candidate.sequence is None else candidate.sequence, candidate.name


def _is_abandoned(candidate: Candidate) -> bool:
    """Whether it goes once the line has a newer one that counts, whatever the policy says."""
    return candidate.own and not candidate.on_line and not candidate.failed and candidate.sequence is not None


def _take(ordered: list[Any], one: Any) -> None:
    at = bisect_left(ordered, one)
    if at < len(ordered) and ordered[at] == one:
        del ordered[at]
