"""Restoring a run: the newest checkpoint on the line that proves whole, or the one the caller names.

Nothing is read twice: a checkpoint is hashed while it is read into the live tensors, after everything else about it was
checked. A wrong byte leads to the next one, said, which overwrites whatever came before it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import AbstractContextManager
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
    RestoreTorn,
)
from ckptd.format.records import CheckpointIndex
from ckptd.link.resumed import Resumed
from ckptd.names import check_step
from ckptd.tensors.loading import Loaded, opened
from ckptd.tensors.restoring import RestoreReport, apply_state, normal_tensors
from ckptd.warning import warn, warn_after_all

__all__ = ["apply", "restore"]

_LISTINGS: Final = 20  # retention may remove what was listed a moment ago; then the run is listed again


def restore(
    root: Root, run: str, state: MutableMapping[Any, Any], *, run_id: str, step: int | None,
    source: str | os.PathLike[str] | None, only: Collection[str] | None, strict: bool,
    knows: Callable[[CheckpointIndex], bool] = lambda _: False, verify_first: bool = False,
) -> Resumed | None:  # fmt: skip
    """Restore the checkpoint at `source`, of `step`, or the newest on the line; see Client.restore.

    knows says of a checkpoint of the run whether the caller took or restored it itself: then this is a rollback of the
    same state.
    """
    if source is not None and step is not None:
        raise InvalidArgument("step and source exclude each other", where="restore", todo="give one of them")
    with normal_tensors():  # what is loaded becomes the live state's
        if source is None:
            # What the next one lacks keeps its value if that isn't strict: nothing may be in it by then.
            first = verify_first or not strict
            return _restore_run(
                root,
                run,
                state,
                run_id=run_id,
                step=step,
                only=only,
                strict=strict,
                knows=knows,
                verify_first=first,
            )
        return _restore_from(
            source,
            root,
            run,
            state,
            run_id=run_id,
            only=only,
            strict=strict,
            knows=knows,
            verify_first=verify_first,
        )


def _restore_run(
    root: Root, run: str, state: MutableMapping[Any, Any], *,
    run_id: str, step: int | None, only: Collection[str] | None, strict: bool,
    knows: Callable[[CheckpointIndex], bool], verify_first: bool,
) -> Resumed | None:  # fmt: skip
    """Restore the newest whole checkpoint on the run's line, or the newest whole one of `step`:
    of those on the line, or of the abandoned ones when the line has none of this step.

    Returns:
        What was done; None when the run has no checkpoint at all and no step was asked for.

    Raises:
        NothingThere: There is none of this step.
        RestoreFailed: There are some, and every one fails its checks; or one of them only when it was in the state
            already, and what comes below befell the rest (`state_touched`).
        ReadFailed: None can be read now, or there are no descriptors or no memory left. The state is untouched.
        CheckpointGone: Retention took each one while it was read, several times over. The state is untouched.
        StateMismatch: The checkpoint is whole and doesn't fit the state, which is untouched.
    """

    def restore_one(entry: Entry, passed: tuple[PassedOver, ...]) -> Resumed:
        with _opened(entry, only, lazily=not verify_first) as loaded:
            return apply(state, loaded, entry.path, run_id, only, strict, knows, passed)

    search = _Search(restore_one)
    try:
        return _restore_first(root, run, step, search)
    except CkptdError as error:
        if not search.touched or (isinstance(error, RestoreFailed) and error.state_touched):
            raise
        raise RestoreFailed(
            "no checkpoint could be restored, and one that failed is in the state in part", state_touched=True,
            where=str(root.run_dir(run)), seen=f"{search.said()}; then {type(error).__name__}: {error}",
            todo="make the objects anew before training on; verify_first=True reads everything before it touches them",
        ) from error  # fmt: skip


def _restore_first(root: Root, run: str, step: int | None, search: _Search) -> Resumed | None:
    run_dir = root.run_dir(run)
    for _ in range(_LISTINGS):
        with reading(run_dir):
            series = read_series(root, run)
        chosen = _of_line(series) if step is None else _of_step(series, check_step(step))
        with contextlib.suppress(CheckpointGone):  # retention took it meanwhile: list the run again
            resumed = search.first_whole(chosen)
            if resumed is not None:
                return resumed
            if step is None and not (search.passed or search.touched):
                return None
            raise search.failure(run_dir)
    raise CheckpointGone("checkpoints keep vanishing while they are read", where=str(run_dir))


class _Search:
    """Looks for the first of some checkpoints that is read whole.

    Args:
        restore_one: Restores one of them, with those that were passed over before it.

    Attributes:
        passed: Those that were not, by name, each with its reason.
        touched: Whether the live state was written to by one that failed then.
    """

    def __init__(self, restore_one: Callable[[Entry, tuple[PassedOver, ...]], Resumed]) -> None:
        self._restore_one = restore_one
        self._corrupt = False
        self.passed: dict[str, PassedOver] = {}
        self.touched = False

    def first_whole(self, chosen: Iterable[Entry]) -> Resumed | None:
        """What it was, or None. Raises CheckpointGone, and ReadFailed where all others would fail alike."""
        for entry in chosen:
            try:
                return self._restore_one(entry, tuple(self.passed.values()))
            except RestoreTorn as error:
                self.touched = True
                warn_after_all()  # one that is an error must not leave the state as it is now
                self._judge(entry, error.__cause__ if isinstance(error.__cause__, CkptdError) else error)
            except (CorruptCheckpoint, ReadFailed) as error:
                self._judge(entry, error)
        return None

    def _judge(self, entry: Entry, error: CkptdError) -> None:
        """Pass the entry over, unless the error says something of more than this one."""
        if isinstance(error, CorruptCheckpoint):
            self._corrupt = True
            _pass_over(entry, str(error), self.passed)
        elif isinstance(error, ReadFailed) and error.errno not in MACHINE_ERRORS:
            _pass_over(entry, entry.reason or str(error), self.passed)
        else:
            raise error

    def said(self) -> str:
        """All that were passed over, with their reasons, in one line."""
        return "; ".join(f"{one.name}: {one.reason}" for one in self.passed.values())

    def failure(self, run_dir: Path) -> CkptdError:
        """Why there is nothing to restore, all having been passed over."""
        seen = self.said()
        if not self._corrupt:
            return none_readable(run_dir, seen)
        return RestoreFailed(
            "no checkpoint could be restored", state_touched=self.touched, where=str(run_dir), seen=seen,
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
    verify_first: bool,
) -> Resumed:  # fmt: skip
    """Restore exactly the checkpoint at a path: a folder of any run, or a file of format v1.

    Raises:
        NothingThere, CorruptCheckpoint, StateMismatch: The state is untouched.
        ReadFailed: Whether it is one of this run can't be told now. The state is untouched.
        RestoreTorn: It proved damaged when a part of it was in the state.
    """
    path = Path(source)
    with opened(path, only=only, lazily=not verify_first) as loaded:
        index = loaded.index
        if index is not None and index.run_id == run_id and _went_another_way(root, run, index):
            run_id = ""
        return apply(state, loaded, path, run_id, only, strict, knows, ())


def _went_another_way(root: Root, run: str, index: CheckpointIndex) -> bool:
    """Whether it is of a copy of the run, made before it: the run has another checkpoint of that sequence."""
    with reading(root.run_dir(run)):
        own = read_series(root, run).own
    return any(one.sequence == index.sequence and one.index_sha256 != index.index_sha256 for one in own)


def _opened(entry: Entry, only: Collection[str] | None, *, lazily: bool) -> AbstractContextManager[Loaded]:
    if entry.status == "unreadable":
        raise ReadFailed(entry.reason, where=str(entry.path), errno=entry.error)
    if entry.status != "committed":
        raise CorruptCheckpoint(entry.reason or entry.status)
    return opened(entry.path, only=only, lazily=lazily)


def apply(
    state: MutableMapping[Any, Any], loaded: Loaded, path: Path, run_id: str,
    only: Collection[str] | None, strict: bool, knows: Callable[[CheckpointIndex], bool],
    passed: tuple[PassedOver, ...],
) -> Resumed:  # fmt: skip
    """Bring the state to what was loaded; what was done."""
    index = loaded.index
    own = index is not None and index.run_id == run_id
    rollback = index is not None and own and knows(index)
    report: RestoreReport = apply_state(
        state, loaded.components, strict=strict, only=only, rollback=rollback, unread=loaded.unread
    )
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
