"""The newest checkpoint of a run, told from the run's index and a listing: without a look into every folder.

A run of thousands takes seconds to read whole. Its newest checkpoint alone is the head of the line unless a fork,
a foreign, moved or unreadable one has a say in it. Where anything of that kind is there, nothing is said here, and
the caller reads the run whole: so the answer is the same, only sooner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from ckptd.disk.decisions import read_decisions
from ckptd.disk.entry import Entry, folder_identity, read_entry
from ckptd.disk.run_index import RunIndex, read_run_index
from ckptd.disk.series_entries import list_quarantine
from ckptd.disk.verification import stat_signature
from ckptd.names import parse_step_folder

#: Checkpoints that the run's index doesn't know yet and that are read for this; with more the run is read whole.
_MOST_UNKNOWN: Final = 16


def newest_on_line(run_dir: Path) -> Entry | None:
    """The newest checkpoint on the run's line, whole as far as a look tells, with its mark; None when that can't be told.

    Raises:
        OSError: The run can't be read now.
    """
    index = read_run_index(run_dir)
    if index is None:
        return None
    before = _listed(run_dir)
    found = _highest(run_dir, before, index)
    if found is None or found.index is None or found.index.run_id != _birth(run_dir, found.index.sequence):
        return None
    # As for every look at a run: a listing taken during a rename may show neither name.
    if _listed(run_dir) != before or _failed_since(run_dir, found.index.sequence):
        return None
    return replace(found, own=True, verified=_is_marked(found, index))


def _listed(run_dir: Path) -> dict[str, str]:
    """Name → identity of what may be a checkpoint."""
    with os.scandir(run_dir) as names:
        return {
            each.name: folder_identity(each.stat(follow_symlinks=False))
            for each in names
            if each.name.startswith("step-") and each.is_dir(follow_symlinks=False)
        }


def _failed_since(run_dir: Path, newest: int) -> bool:
    """Whether a newer one was found corrupt and moved: the answer has to say so."""
    return any(sequence > newest for sequence, _ in list_quarantine(run_dir))


def _highest(run_dir: Path, names: dict[str, str], index: RunIndex) -> Entry | None:
    """The one of the highest sequence, read; None when two have that, or one that isn't known can't be told."""
    known = {summary.name: summary for summary in index.checkpoints}
    unknown, highest, holders = [], -1, list[str]()
    for name, identity in names.items():
        summary = known.get(name)
        if summary is None or summary.identity != identity:
            unknown.append(name)
        elif summary.sequence >= highest:
            holders = [name] if summary.sequence > highest else [*holders, name]
            highest = summary.sequence
    read = _read(run_dir, unknown)
    if read is None or len(holders) > 1:
        return None
    head = [read_entry(run_dir / name) for name in holders]
    entries = [entry for entry in (*head, *read) if entry is not None]
    if any(entry is None or entry.sequence != highest for entry in head):
        return None
    if any(entry.index is None for entry in entries):
        return None
    entries.sort(key=lambda entry: entry.sequence or 0)
    if not entries or (len(entries) > 1 and entries[-1].sequence == entries[-2].sequence):
        return None
    return entries[-1]


def _read(run_dir: Path, names: Iterable[str]) -> list[Entry | None] | None:
    named = [name for name in names if parse_step_folder(name) is not None]
    return [read_entry(run_dir / name) for name in named] if len(named) <= _MOST_UNKNOWN else None


def _birth(run_dir: Path, newest: int) -> str:
    """The run's id; "" when a decision can't be read, or a fork may have taken effect behind the newest."""
    decisions = read_decisions(run_dir)
    if decisions.unreadable or decisions.errors or any(fork.sequence > newest for fork in decisions.forks):
        return ""
    return decisions.birth_run_id or ""


def _is_marked(entry: Entry, index: RunIndex) -> bool:
    for mark in index.marks:
        if mark.name == entry.name and entry.index is not None:
            same = (mark.sequence, mark.index_sha256) == (entry.index.sequence, entry.index.index_sha256)
            return same and mark.stat_signature == stat_signature(entry.path)
    return False
