"""Restoring a run: the newest checkpoint on the line that proves whole, or the one the caller names.

Nothing is read twice: a checkpoint is hashed while it is loaded, and a wrong byte leads to the next one,
said. The live state is touched only by a checkpoint that was read whole and fits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ckptd.disk.entry import MACHINE_ERRORS, none_readable, reading
from ckptd.disk.rootdir import Root
from ckptd.disk.series import Entry, PassedOver, Series, candidates, read_series
from ckptd.errors import (
    CheckpointGone,
    CkptdError,
    CorruptCheckpoint,
    InvalidArgument,
    NothingThere,
    ReadFailed,
    RestoreFailed,
)
from ckptd.format.records import CheckpointIndex
from ckptd.names import check_step
from ckptd.tensors.loading import Loaded, load_with_index
from ckptd.tensors.restoring import RestoreReport, apply_state, normal_tensors
from ckptd.warning import warn

__all__ = ["Resumed", "restore"]

_LISTINGS: Final = 20  # retention may remove what was listed a moment ago; then the run is listed again


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a restore did.

    Attributes:
        step: Finished optimizer steps of the state that was restored.
        path: The checkpoint.
        passed_over: Newer ones that failed their checks, each with its reason.
        missing: Key paths that are in the live state and not in the checkpoint; they keep their values.
        unused: Key paths that are in the checkpoint and not in the live state; they were ignored.
        reshaped: Key paths of tensors that have another shape in the checkpoint; they keep their values.
        not_asked: Names of the components that the checkpoint has and `only` left out.
        dropped: Key paths of entries of live dicts that the checkpoint lacks: they were removed.
        tolerated: With `strict=False`: what differs and was taken all the same, each with its key path, in words: parameter
            groups (and whose settings each has now) and classes of optimizers, values of another kind or dtype, numbers
            that were rounded; and optimizer state that couldn't be taken.
        sequence: The checkpoint's commit counter; None when it isn't one of this run.
        run_seconds: Training seconds of the run up to it; 0.0 when it isn't one of this run (a warm start), whose
            seconds begin anew.
        in_part: `only` left out something of the live state.
        staged: It was restored from the slot in which an earlier client left it: `path` is the folder that a daemon
            makes of it, and may not be there yet.
    """

    step: int
    path: Path
    passed_over: tuple[PassedOver, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    not_asked: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    sequence: int | None = None
    run_seconds: float = 0.0
    dropped: tuple[str, ...] = ()
    in_part: bool = False
    staged: bool = False

    @property
    def next_step(self) -> int:
        """The step to train next: step + 1; 1 after a warm start from another run that took over only a part."""
        return 1 if self.in_part and self.sequence is None else self.step + 1


def restore(
    root: Root, run: str, state: MutableMapping[Any, Any], *, run_id: str, step: int | None,
    source: str | os.PathLike[str] | None, only: Collection[str] | None, strict: bool,
    knows: Callable[[CheckpointIndex], bool] = lambda _: False,
) -> Resumed | None:  # fmt: skip
    """Restore the checkpoint at `source`, of `step`, or the newest on the line; see Client.restore.

    knows says of a checkpoint of the run whether the caller took or restored it itself: then this is a rollback of the
    same state.
    """
    if source is not None and step is not None:
        raise InvalidArgument("step and source exclude each other", where="restore", todo="give one of them")
    with normal_tensors():  # what is loaded becomes the live state's
        if source is None:
            return _restore_run(
                root, run, state, run_id=run_id, step=step, only=only, strict=strict, knows=knows
            )
        return _restore_from(source, root, run, state, run_id=run_id, only=only, strict=strict, knows=knows)


def _restore_run(
    root: Root, run: str, state: MutableMapping[Any, Any], *,
    run_id: str, step: int | None, only: Collection[str] | None, strict: bool,
    knows: Callable[[CheckpointIndex], bool],
) -> Resumed | None:  # fmt: skip
    """Restore the newest whole checkpoint on the run's line, or the newest whole one of `step`:
    of those on the line, or of the abandoned ones when the line has none of this step.

    Returns:
        What was done; None when the run has no checkpoint at all and no step was asked for.

    Raises:
        NothingThere: There is none of this step.
        RestoreFailed: There are some, and every one fails its checks. The state is untouched.
        ReadFailed: None can be read now, or there are no descriptors or no memory left. The state is untouched.
        CheckpointGone: Retention took each one while it was read, several times over. The state is untouched.
        StateMismatch: The checkpoint is whole and doesn't fit the state, which is untouched.
    """
    run_dir, search = root.run_dir(run), _Search(only)
    for _ in range(_LISTINGS):
        with reading(run_dir):
            series = read_series(root, run)
        chosen = _of_line(series) if step is None else _of_step(series, check_step(step))
        with contextlib.suppress(CheckpointGone):  # retention took it meanwhile: list the run again
            found = search.first_whole(chosen)
            if found is not None:
                entry, loaded = found
                passed = tuple(search.passed.values())
                return apply(state, loaded, entry.path, run_id, only, strict, knows, passed)
            if step is None and not search.passed:
                return None
            raise search.failure(run_dir)
    raise CheckpointGone("checkpoints keep vanishing while they are read", where=str(run_dir))


class _Search:
    """Looks for the first of some checkpoints that is read whole.

    Attributes:
        passed: Those that were not, by name, each with its reason.
    """

    def __init__(self, only: Collection[str] | None) -> None:
        self._only = only
        self._corrupt = False
        self.passed: dict[str, PassedOver] = {}

    def first_whole(self, chosen: Iterable[Entry]) -> tuple[Entry, Loaded] | None:
        """It, loaded and checked, or None. Raises CheckpointGone, and ReadFailed where all others would fail alike."""
        for entry in chosen:
            try:
                return entry, _load(entry, self._only)
            except ReadFailed as error:
                if error.errno in MACHINE_ERRORS:
                    raise
                _pass_over(entry, entry.reason or str(error), self.passed)
            except CorruptCheckpoint as error:
                _pass_over(entry, str(error), self.passed)
                self._corrupt = True
        return None

    def failure(self, run_dir: Path) -> CkptdError:
        """Why there is nothing to restore, all having been passed over."""
        seen = "; ".join(f"{one.name}: {one.reason}" for one in self.passed.values())
        if not self._corrupt:
            return none_readable(run_dir, seen)
        return RestoreFailed(
            "no checkpoint could be restored", where=str(run_dir), seen=seen,
            todo="look with: ckptd list; restore another one with step= or source=",
        )  # fmt: skip


def _of_line(series: Series) -> list[Entry]:
    """What a restore looks through, newest first. A run with nothing but abandoned ones is no fresh start."""
    chosen = candidates(series)
    if series.entries and not chosen:
        raise RestoreFailed(
            "all checkpoints are abandoned", where=str(series.run_dir),
            todo="look with: ckptd list; restore one of them with step= or source=",
        )  # fmt: skip
    return chosen


def _restore_from(
    source: str | os.PathLike[str], root: Root, run: str, state: MutableMapping[Any, Any], *,
    run_id: str, only: Collection[str] | None, strict: bool, knows: Callable[[CheckpointIndex], bool],
) -> Resumed:  # fmt: skip
    """Restore exactly the checkpoint at a path: a folder of any run, or a file of format v1.

    Raises:
        NothingThere, CorruptCheckpoint, StateMismatch: The state is untouched.
        ReadFailed: Whether it is one of this run can't be told now. The state is untouched.
    """
    path = Path(source)
    loaded = load_with_index(path, only=only, absent_ok=True)
    index = loaded.index
    if index is not None and index.run_id == run_id and _went_another_way(root, run, index):
        run_id = ""
    return apply(state, loaded, path, run_id, only, strict, knows, ())


def _went_another_way(root: Root, run: str, index: CheckpointIndex) -> bool:
    """Whether it is of a copy of the run, made before it: the run has another checkpoint of that sequence."""
    with reading(root.run_dir(run)):
        own = read_series(root, run).own
    return any(one.sequence == index.sequence and one.index_sha256 != index.index_sha256 for one in own)


def _load(entry: Entry, only: Collection[str] | None) -> Loaded:
    if entry.status == "unreadable":
        raise ReadFailed(entry.reason, where=str(entry.path), errno=entry.error)
    if entry.status != "committed":
        raise CorruptCheckpoint(entry.reason or entry.status)
    return load_with_index(entry.path, only=only, absent_ok=True)


def apply(
    state: MutableMapping[Any, Any], loaded: Loaded, path: Path, run_id: str,
    only: Collection[str] | None, strict: bool, knows: Callable[[CheckpointIndex], bool],
    passed: tuple[PassedOver, ...],
) -> Resumed:  # fmt: skip
    """Bring the state to what was loaded; what was done."""
    index = loaded.index
    own = index is not None and index.run_id == run_id
    rollback = index is not None and own and knows(index)
    report: RestoreReport = apply_state(state, loaded.components, strict=strict, only=only, rollback=rollback)
    return Resumed(
        step=loaded.step,
        path=path,
        passed_over=passed,
        missing=tuple(report.missing),
        unused=tuple(report.unused),
        reshaped=tuple(report.reshaped),
        dropped=tuple(report.dropped),
        not_asked=tuple(name for name in loaded.names if only is not None and name not in only),
        tolerated=tuple(report.tolerated),
        sequence=index.sequence if index is not None and own else None,
        run_seconds=index.run_seconds if index is not None and own else 0.0,
        in_part=only is not None and not set(state) <= set(only),
    )


def _of_step(series: Series, step: int) -> list[Entry]:
    found = [entry for entry in series.entries if entry.step == step]
    if not found:
        known = sorted({entry.step for entry in series.entries})
        raise NothingThere(
            "no checkpoint of this step", where=f"run {series.run}", seen=f"step {step}",
            wanted=f"one of {known[:20]}" if known else "", todo="look with: ckptd list",
        )  # fmt: skip
    # Where the line has this step, an abandoned one of it is another state: only its path brings that back.
    chosen = [entry for entry in found if entry.on_line] or found
    return sorted(chosen, key=lambda entry: entry.sequence or 0, reverse=True)


def _pass_over(entry: Entry, reason: str, passed: dict[str, PassedOver]) -> None:
    if entry.name not in passed:
        passed[entry.name] = PassedOver(entry.name, reason)
        warn(f"{entry.name} is passed over: {reason}")
