"""Which checkpoints of a run stay and which go: a pure function, with a reason for every answer.

What must be true of it, whatever the policy says (losing any of these loses training):

- Nothing is removed while a decision of the run can't be read: it may be the one that keeps something; nor
  while one of its checkpoints can't: it may be the head that all others are judged by.
- Only verified checkpoints on the line count. An unverified one fills no place and takes none from another.
- Never removed: the newest verified one, anything newer than it, the best by the policy's metric, what isn't
  this run's own, what failed its check, what hasn't been checked yet.
- Abandoned ones go only when the line holds a verified checkpoint newer than they are: until then a restore
  of an older checkpoint has changed nothing.
- Order comes from the sequence; never from a step, a name, a clock or an mtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptd_daemon.series.policy import RetentionPolicy


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One checkpoint as retention sees it.

    Attributes:
        name: Its folder.
        sequence: Its place in the run's order; None when its index can't be read.
        own: It provably belongs to this run (same run_id).
        on_line: It is on the line that ends at the head; False: abandoned by a fork.
        verified: Every hash was found equal on the medium.
        failed: Why it failed its last check; "" when it didn't.
        metrics: By name; NaN counts as missing.
    """

    name: str
    sequence: int | None
    own: bool = True
    on_line: bool = True
    verified: bool = False
    failed: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Whether one checkpoint stays, and every reason why."""

    name: str
    keep: bool
    reasons: tuple[str, ...]


def decide(
    candidates: Sequence[Candidate], policy: RetentionPolicy, *, unreadable: Sequence[str] = ()
) -> list[Verdict]:
    """One verdict for each candidate, in their order.

    Args:
        unreadable: The decisions and checkpoints of the run that can't be read now, in words; any at all keeps
            everything.
    """
    if unreadable:
        reason = f"something of the run can't be read now ({unreadable[0]})"
        return [Verdict(candidate.name, True, (reason,)) for candidate in candidates]
    newest, chosen = _chosen(candidates, policy)
    return [_verdict(candidate, newest, chosen.get(candidate.name, []), policy) for candidate in candidates]


def _chosen(
    candidates: Sequence[Candidate], policy: RetentionPolicy
) -> tuple[int | None, dict[str, list[str]]]:
    """The sequence of the newest verified one, and why the policy keeps which."""
    line = sorted(filter(counts, candidates), key=lambda c: (_sequence(c), c.name), reverse=True)
    return _sequence(line[0]) if line else None, _by_policy(line, policy)


def counts(candidate: Candidate) -> bool:
    """Whether it fills a place: verified, on the line, and hasn't failed since."""
    c = candidate
    return c.own and c.on_line and c.verified and not c.failed and c.sequence is not None


def rank(candidate: Candidate, metric: str, mode: str) -> tuple[float, int, str] | None:
    """Lower is better, and of equal ones the newer. None without that metric; NaN is no value."""
    value = candidate.metrics.get(metric, math.nan)
    if math.isnan(value):
        return None
    return -value if mode == "max" else value, -_sequence(candidate), candidate.name


def best_first(candidates: Sequence[Candidate], metric: str, mode: str) -> list[Candidate]:
    """Those that have the metric, the best first; of equal ones the newer first. NaN is no value."""
    rated = [(rated, c) for c in candidates if (rated := rank(c, metric, mode)) is not None]
    return [candidate for _, candidate in sorted(rated, key=lambda one: one[0])]


def why_removed(candidate: Candidate, policy: RetentionPolicy) -> Verdict:
    """The verdict on one that may go and that no rule picks."""
    if not candidate.on_line:
        return Verdict(candidate.name, False, ("abandoned, and the new line has a newer verified one",))
    reasons = [f"not one of the last {policy.keep_last}"]
    if policy.monitor is not None:
        reasons.append(f"not one of the best {max(1, policy.keep_best)} by {policy.monitor} ({policy.mode})")
    return Verdict(candidate.name, False, tuple(reasons))


def _by_policy(line: Sequence[Candidate], policy: RetentionPolicy) -> dict[str, list[str]]:
    """Name → why it stays, for what the rules pick; line is newest first."""
    reason = f"one of the last {policy.keep_last}"
    chosen = {candidate.name: [reason] for candidate in line[: policy.keep_last]}
    if line:
        chosen.setdefault(line[0].name, []).insert(0, "the newest verified one")
    if policy.monitor is not None and policy.mode is not None:
        count = max(1, policy.keep_best)
        for candidate in best_first(line, policy.monitor, policy.mode)[:count]:
            value = candidate.metrics[policy.monitor]
            reason = f"one of the best {count} by {policy.monitor} ({policy.mode}): {value:g}"
            chosen.setdefault(candidate.name, []).append(reason)
    return chosen


def _verdict(candidate: Candidate, newest: int | None, chosen: list[str], policy: RetentionPolicy) -> Verdict:
    if reason := _untouchable(candidate, newest):
        return Verdict(candidate.name, True, (reason, *chosen))
    if chosen:
        return Verdict(candidate.name, True, tuple(chosen))
    return why_removed(candidate, policy)


def _untouchable(candidate: Candidate, newest: int | None) -> str:
    """Why no policy may remove it; "" when one may."""
    if not candidate.own:
        return "not this run's own"
    if candidate.sequence is None:
        return "its index can't be read"
    if candidate.failed:
        return f"failed its check: {candidate.failed}"
    if newest is None:
        return "no checkpoint of the line is verified yet"
    if candidate.sequence > newest:
        return "newer than the newest verified one"
    if candidate.on_line and not candidate.verified:
        return "not verified yet"
    return ""


def _sequence(candidate: Candidate) -> int:
    return -1 if candidate.sequence is None else candidate.sequence
