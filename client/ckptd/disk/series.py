"""The questions a run answers at any time, daemon or not: which is the latest valid checkpoint, the best.

What fails any check is passed over and said, with the reason. That there is none (None) is said only of a run
with no checkpoint at all; that all of them fail is an error of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ckptd.disk.decisions import read_decisions
from ckptd.disk.entry import none_readable, reading
from ckptd.disk.in_quarantine import read_quarantine
from ckptd.disk.newest import newest_on_line
from ckptd.disk.proving import Proof
from ckptd.disk.root_runs import AnyRoot, other_runs, runs
from ckptd.disk.root_runs import opened as open_root
from ckptd.disk.rootdir import Root
from ckptd.disk.run_index import Mark, RunIndex, Summary, read_run_index, write_run_index
from ckptd.disk.series_entries import Entry, Series, candidates, list_run, position_after, read_series
from ckptd.errors import CheckpointGone, InvalidArgument, NothingThere, NoValidCheckpoint
from ckptd.names import DEFAULT_RUN, check_run_name, parse_step_folder

__all__ = [
    "Checkpoint", "Entry", "Mark", "PassedOver", "RunIndex", "Series", "Summary",
    "best", "candidates", "checkpoints", "latest_valid", "list_run", "position_after", "read_decisions",
    "read_run_index", "read_series", "runs", "select", "write_run_index",
]  # fmt: skip

_TRIES: Final = 200
_STEP: Final = re.compile(r"([0-9]{1,16})(?:\.([1-9][0-9]{0,8}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A newer checkpoint that isn't the answer, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint as an answer.

    Attributes:
        path, name: Its folder.
        run: Its run.
        step: Finished optimizer steps.
        sequence: Its place in the run's order.
        saved_at: Unix seconds.
        metrics: As they were given at commit.
        verified: Its hashes were found equal, now or before.
        passed_over: Newer ones that fail their checks, newest first.
    """

    path: Path
    name: str
    run: str
    step: int
    sequence: int
    saved_at: float
    metrics: dict[str, float] = field(default_factory=dict)
    verified: bool = True
    passed_over: tuple[PassedOver, ...] = ()


def latest_valid(
    root: AnyRoot,
    run: str = DEFAULT_RUN,
    *,
    wait: bool = True,
    on_progress: Callable[[str], None] | None = None,
) -> Checkpoint | None:
    """The newest verified checkpoint on the run's line. Reads only; works with and without a daemon.

    Args:
        root: The root.
        run: The run.
        wait: Verify newer committed ones first (their bytes are read). False answers at once with what is
            verified already; None then also means that nothing is verified yet.
        on_progress: Told in words what is being verified.

    Returns:
        None when the run has no checkpoint.

    Raises:
        NoValidCheckpoint: There are checkpoints, and every one fails its checks.
        BadRoot: The root is a file.
        InvalidArgument: Not a run name.
        ReadFailed: The run, or every checkpoint in it, can't be read now; that says nothing about them.
    """
    opened = open_root(root)
    check_run_name(run)
    if opened is None:
        return None
    proof = Proof(wait, on_progress)
    newest = _newest_valid(opened.run_dir(run), proof)
    if newest is not None:
        return _answer(run, newest, ())
    return _steadily(opened, run, lambda series: _latest(series, proof))


def checkpoints(root: AnyRoot, run: str = DEFAULT_RUN) -> list[Checkpoint]:
    """The committed checkpoints on the run's line, oldest first; verifies nothing (`verified` says).

    Raises:
        ReadFailed: The run, or every checkpoint in it, can't be read now.
    """
    opened = open_root(root)
    if opened is None:
        return []
    with reading(opened.run_dir(run)):
        series = read_series(opened, run)
    entries = list(reversed(candidates(series)))
    found = [_answer(series.run, entry) for entry in entries if entry.status == "committed"]
    if not found:
        _refuse_if_unread([entry for entry in entries if entry.status == "unreadable"], entries, series)
    return found


def best(
    root: AnyRoot, run: str, metric: str, mode: Literal["min", "max"] | str, *,
    on_progress: Callable[[str], None] | None = None,
) -> Checkpoint | None:  # fmt: skip
    """The valid checkpoint on the line with the best value of a metric; of equal ones the newest.

    Args:
        metric: Checkpoints without it, or where it is NaN, don't count.
        mode: "min" or "max".
        on_progress: Told in words what is being verified.

    Returns:
        None when no checkpoint has the metric.

    Raises:
        InvalidArgument: Another mode.
        NoValidCheckpoint: There are such checkpoints, and every one fails its checks.
    """
    if mode not in ("min", "max"):
        raise InvalidArgument("not a mode", where="mode", seen=repr(mode), wanted="min or max")
    opened = open_root(root)
    if opened is None:
        return None

    def ask(series: Series) -> Checkpoint | None:
        rated = [entry for entry in candidates(series) if not math.isnan(_metric(entry, metric))]
        rated.sort(key=lambda entry: _metric(entry, metric), reverse=mode == "max")
        return _newest(series, rated, proof)

    proof = Proof(True, on_progress)
    return _steadily(opened, run, ask)


def select(root: AnyRoot, run: str, selector: str) -> Path:
    """The folder of a step ("1200", "1200.2" for its second commit) or of that name. It isn't verified by this.

    Of a step saved several times it is the newest, on the line if one is.

    Raises:
        NothingThere: Nothing fits.
        InvalidArgument: Neither a step nor a folder's name.
    """
    where = f"{root.path if isinstance(root, Root) else os.fspath(root)}, run {run}"
    wanted = _wanted_step(selector)
    if wanted is None:
        raise InvalidArgument(
            "not a selector", where="SEL", seen=repr(selector),
            wanted="latest, best, a step such as 1200 or 1200.2, or a path",
        )  # fmt: skip
    opened = open_root(root)
    with reading(where):
        entries = () if opened is None else read_series(opened, run).entries
    fitting = _fitting(entries, wanted)
    if not fitting:
        held = [] if opened is None else [entry for _, entry in read_quarantine(opened.run_dir(run))]
        raise NothingThere(
            f"no checkpoint of step {selector}", where=where,
            seen="; ".join(entry.reason for entry in _fitting(held, wanted)),
            todo=("" if entries or held else other_runs(opened or root, run)) or "see ckptd list",
        )  # fmt: skip
    return max(enumerate(fitting), key=lambda at: (at[1].status == "committed", at[1].on_line, at[0]))[1].path


def _steadily(root: Root, run: str, ask: Callable[[Series], Checkpoint | None]) -> Checkpoint | None:
    """Ask again, of the run as it is then, when retention took a checkpoint while it was read."""
    for _ in range(_TRIES):
        with contextlib.suppress(CheckpointGone), reading(root.run_dir(run)):
            return ask(read_series(root, run))
    raise CheckpointGone("checkpoints keep vanishing while they are read", where=str(root.run_dir(run)))


def _newest_valid(run_dir: Path, proof: Proof) -> Entry | None:
    """The newest on the line if it is valid and can be told without reading the whole run."""
    with contextlib.suppress(
        OSError, CheckpointGone
    ):  # whatever is the matter, reading the whole run says it
        newest = newest_on_line(run_dir)
        if newest is not None and not proof.fault(newest):
            return newest
    return None


def _latest(series: Series, proof: Proof) -> Checkpoint | None:
    found = _newest(series, candidates(series), proof)
    if found is None and list_run(series.run_dir).steps != {entry.name for entry in series.entries}:
        raise CheckpointGone("the run changed while it was read", where=str(series.run_dir))
    if found is None and proof.wait and series.entries:
        raise NoValidCheckpoint(
            "all checkpoints are abandoned", where=str(series.run_dir), todo="see ckptd list"
        )
    return found


def _newest(series: Series, entries: list[Entry], proof: Proof) -> Checkpoint | None:
    """The first of the entries that is valid."""
    passed: list[PassedOver] = []
    proof.unread.clear()
    for entry in entries:
        fault = proof.fault(entry)
        if not fault:
            return _answer(series.run, entry, tuple(passed))
        passed.append(PassedOver(entry.name, fault))
    undecided = not proof.wait and any(entry.status == "committed" for entry in entries)
    if not undecided:
        _refuse_if_unread(proof.unread, entries, series)
    if passed and not undecided:
        raise NoValidCheckpoint(
            "every checkpoint fails its checks", where=str(series.run_dir),
            seen="; ".join(f"{each.name}: {each.reason}" for each in passed),
            todo="look at the disk; a checkpoint of another line or run can be restored by name",
        )  # fmt: skip
    return None


def _refuse_if_unread(unread: list[Entry], entries: list[Entry], series: Series) -> None:
    """To say that none is valid is right only if one of them is known to be bad."""
    if unread and len(unread) == len(entries):
        seen = "; ".join(f"{entry.name}: {entry.reason or 'its files'}" for entry in unread)
        raise none_readable(series.run_dir, seen)


def _answer(run: str, entry: Entry, passed: tuple[PassedOver, ...] | None = None) -> Checkpoint:
    index = entry.index
    if index is None:
        raise NothingThere("no index", where=str(entry.path))
    return Checkpoint(
        path=entry.path, name=entry.name, run=run, step=index.step, sequence=index.sequence,
        saved_at=index.saved_at, metrics=dict(index.metrics),
        verified=entry.verified or passed is not None, passed_over=passed or (),
    )  # fmt: skip


def _metric(entry: Entry, metric: str) -> float:
    if entry.index is None or entry.status != "committed":
        return math.nan
    return entry.index.metrics.get(metric, math.nan)


def _fitting(entries: Iterable[Entry], wanted: tuple[int, int | None]) -> list[Entry]:
    """Those of the wanted step, and repeat unless any will do."""
    return [entry for entry in entries if entry.step == wanted[0] and wanted[1] in (None, entry.repeat)]


def _wanted_step(selector: str) -> tuple[int, int | None] | None:
    """(step, repeat or None for any) of "1200", "1200.2" or a folder's name."""
    if match := _STEP.fullmatch(selector):
        return int(match[1]), int(match[2]) if match[2] else None
    return parse_step_folder(selector)
