"""The newest checkpoint of a run, told without a look into every folder: by newest.json, or a listing and what is recent.

A run of thousands takes seconds to read whole. Its newest checkpoint alone is the head of the line unless a fork,
a foreign, moved or unreadable one has a say in it. Where anything of that kind is there, nothing is said here, and
the caller reads the run whole: so the answer is the same, only sooner. It doesn't take longer in a larger run while
the folder is as newest.json has it; else there is a listing, which grows with the run, for nothing but the names says
then that there is no newer one.

A listing taken while folders are renamed can show neither the old nor the new one. What this rests on: before anything
is removed, recent.json says what stays for it (retention sees to that), and it is read after the listing. A folder
that somebody else renamed meanwhile shows in the times of the run's folder, and it is listed again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from ckptd.disk.decisions import read_decisions
from ckptd.disk.entry import Entry, folder_identity, read_entry
from ckptd.disk.newest_file import FolderState, Newest, read_newest
from ckptd.disk.run_index import Mark, Recent, Summary, known_folders, token_of
from ckptd.disk.series_entries import list_quarantine
from ckptd.disk.verification import stat_signature
from ckptd.names import parse_step_folder

#: Checkpoints that the run's index doesn't know yet and that are read for this; with more the run is read whole.
_MOST_UNKNOWN: Final = 16
#: How often to look again at a run that changes meanwhile, before it is read whole.
_MOST_LOOKS: Final = 3


def newest_on_line(run_dir: Path) -> Entry | None:
    """The newest checkpoint on the run's line, whole as far as a look tells, with its mark; None when that can't be told.

    Raises:
        OSError: The run can't be read now.
    """
    for _ in range(_MOST_LOOKS):
        state = FolderState.of(run_dir)
        if (noted := read_newest(run_dir, state)) is not None:
            found = _noted(run_dir, noted)
            if FolderState.of(run_dir) == state:
                return _judged(run_dir, found, [noted.mark] if noted.mark else [])
            continue
        listed, known = _listed(run_dir), known_folders(run_dir)
        if known is None:
            return None
        recent, folders = known
        found = _highest(run_dir, listed, recent, folders)
        if FolderState.of(run_dir) == state or _listed(run_dir) == listed:
            return _judged(run_dir, found, recent.marks)
    return None


def _judged(run_dir: Path, found: Entry | None, marks: Iterable[Mark]) -> Entry | None:
    """It with its mark; None when something else has a say."""
    if found is None or found.index is None or found.index.run_id != _birth(run_dir, found.index.sequence):
        return None
    if _failed_since(run_dir, found.index.sequence):
        return None
    return replace(found, own=True, verified=_is_marked(found, marks))


def _noted(run_dir: Path, noted: Newest) -> Entry | None:
    """The one of newest.json, read; None when it isn't what that says."""
    entry = read_entry(run_dir / noted.name) if parse_step_folder(noted.name) is not None else None
    same = entry is not None and token_of(entry.name, entry.identity) == noted.token
    return entry if same and entry is not None and entry.sequence == noted.sequence else None


def _listed(run_dir: Path) -> set[str]:
    """The token_of every checkpoint. To look at each costs five times the listing, which alone doesn't tell: a folder
    that is made gets the inode of one that was removed, often at once."""
    found = set[str]()
    with os.scandir(run_dir) as names:
        for each in names:
            with contextlib.suppress(FileNotFoundError):  # it went: as if it were listed later
                if each.name.startswith("step-"):
                    found.add(token_of(each.name, folder_identity(each.stat(follow_symlinks=False))))
    return found


def _failed_since(run_dir: Path, newest: int) -> bool:
    """Whether a newer one was found corrupt and moved: the answer has to say so."""
    return any(sequence > newest for sequence, _ in list_quarantine(run_dir))


def _highest(run_dir: Path, listed: set[str], recent: Recent, folders: set[str]) -> Entry | None:
    """The one of the highest sequence, read; None when two have that, or one that isn't known can't be told."""
    read = _read(run_dir, listed.difference(folders))
    head = _newest_known(recent)
    if read is None or not head.keys() <= listed:
        return None
    known = [read_entry(run_dir / summary.name) for summary in head.values()]
    if [entry and entry.sequence for entry in known] != [summary.sequence for summary in head.values()]:
        return None
    entries = [entry for entry in (*known, *read) if entry is not None]
    if any(entry.index is None for entry in entries):
        return None
    entries.sort(key=lambda entry: entry.sequence or 0)
    if not entries or (len(entries) > 1 and entries[-1].sequence == entries[-2].sequence):
        return None
    return entries[-1]


def _newest_known(recent: Recent) -> dict[str, Summary]:
    """token_of → row of those with the highest sequence that is known."""
    highest = max((summary.sequence for summary in recent.checkpoints), default=0)
    newest = (summary for summary in recent.checkpoints if summary.sequence == highest)
    return {token_of(one.name, one.identity): one for one in newest}


def _read(run_dir: Path, tokens: Iterable[str]) -> list[Entry | None] | None:
    names = (token.partition(":")[0] for token in tokens)
    named = [name for name in names if parse_step_folder(name) is not None]
    return [read_entry(run_dir / name) for name in named] if len(named) <= _MOST_UNKNOWN else None


def _birth(run_dir: Path, newest: int) -> str:
    """The run's id; "" when a decision can't be read, or a fork may have taken effect behind the newest."""
    decisions = read_decisions(run_dir)
    if decisions.unreadable or decisions.errors or any(fork.sequence > newest for fork in decisions.forks):
        return ""
    return decisions.birth_run_id or ""


def _is_marked(entry: Entry, marks: Iterable[Mark]) -> bool:
    for mark in marks:
        if mark.name == entry.name and entry.index is not None:
            same = (mark.sequence, mark.index_sha256) == (entry.index.sequence, entry.index.index_sha256)
            return same and mark.stat_signature == stat_signature(entry.path)
    return False
