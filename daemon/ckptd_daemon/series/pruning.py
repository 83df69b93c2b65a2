"""Carrying out what retention decides, having looked once more at what the decision rests on.

What must be true: nothing is removed whose index isn't the one the decision was made on, nor while one of the
checkpoints that make it dispensable hasn't the files any more that were verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ckptd.errors import CorruptCheckpoint
from ckptd.format.records import read_index
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.retention import Verdict
from ckptd_daemon.series.run_view import RunView
from ckptd_daemon.series.trash import Trash

#: Removed in one go: with thousands to remove commits would wait for minutes.
MOST_AT_ONCE: Final = 100

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A checkpoint that retention took out of the run, and why."""

    name: str
    step: int
    sequence: int
    bytes: int
    reasons: tuple[str, ...]


def dispensable(view: RunView, policy: RetentionPolicy) -> list[Verdict]:
    """Which checkpoints the policy doesn't keep now."""
    unreadable = [*view.unreadable_decisions(), *view.in_doubt()]
    return view.known.standings.to_remove(policy, unreadable=unreadable)


def prune(
    view: RunView, policy: RetentionPolicy, trash: Trash, *, before: Callable[[], object] = lambda: None
) -> list[Removed]:
    """Remove what the policy doesn't keep; what can't be removed is warned of and stays for the next time.

    At most MOST_AT_ONCE go, the oldest first; the others stay for the next time too.

    `before` is called before the first one goes, if any does.
    """
    while pillars := _pillars(view, policy):
        if unseen := [name for name in pillars if not view.can_be_looked_at(name)]:
            log.warning("retention.put_off run=%s: %s can't be looked at now", view.run, unseen[0])
            return []
        if not _distrust_changed(view, pillars):
            break
    asked = (_removal(view, verdict) for verdict in dispensable(view, policy))
    doomed = list(islice((removal for removal in asked if removal is not None), MOST_AT_ONCE))
    if doomed:
        before()
    gone = set(trash.throw([(removal.name, removal.sequence) for removal in doomed]))
    view.drop(gone)
    removed = [removal for removal in doomed if removal.name in gone]
    for one in removed:
        log.info("retention.removed run=%s name=%s: %s", view.run, one.name, "; ".join(one.reasons))
    return removed


def _distrust_changed(view: RunView, pillars: list[str]) -> bool:
    """Unmark those that haven't the files any more that were verified; whether there were any."""
    suspects = [name for name in pillars if not view.unchanged(name)]
    for name in suspects:
        log.warning("checkpoint.changed run=%s name=%s; it counts again once verified", view.run, name)
        view.unmark(name)
    return bool(suspects)


def _pillars(view: RunView, policy: RetentionPolicy) -> list[str]:
    """The checkpoints that the others may go because of."""
    standings = view.known.standings
    newest = standings.newest()
    return [*([] if newest is None else [newest.name]), *standings.best(policy)[:1]]


def _removal(view: RunView, verdict: Verdict) -> Removed | None:
    """The removal that a verdict asks for; None when what is on disk isn't what it was decided on."""
    entry = view[verdict.name]
    if entry is None or entry.index is None:
        return None
    try:
        same = read_index(entry.path).index_sha256 == entry.index.index_sha256
    except FileNotFoundError:
        same = not entry.path.exists()  # gone already, by hand
    except (CorruptCheckpoint, OSError):
        same = False
    if not same:
        return None
    return Removed(
        name=entry.name, step=entry.step, sequence=entry.index.sequence, bytes=entry.index.total_bytes,
        reasons=verdict.reasons,
    )  # fmt: skip
