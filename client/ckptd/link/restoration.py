"""A client's restore: from the slot of an earlier client where the newest snapshot still lies, else from the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, MutableMapping
from typing import Any

from ckptd.disk.rootdir import Root
from ckptd.errors import CkptdError, NoDaemon, NothingThere, RestoreFailed, RestoreTorn, TimedOut
from ckptd.link.earlier import EarlierSlots, StagedSnapshot
from ckptd.link.from_slot import restore_from_slot
from ckptd.link.recorder import Recorder
from ckptd.link.resume import restore
from ckptd.link.resumed import Resumed
from ckptd.link.writers import Writer
from ckptd.warning import HeldBack, warn, warn_after_all

__all__ = ["Restoration"]


class Restoration:
    """Restores one run. The writer's lock guards it.

    Args:
        root: The root.
        run: The run's name.
        client_id: The client's, 32 hex digits.
        writer: Knows what is on its way.
        recorder: Goes on from what was restored.
        timeout_s: Bound of the wait for what earlier clients left.
    """

    def __init__(
        self, root: Root, run: str, client_id: str, *, writer: Writer, recorder: Recorder, timeout_s: float
    ) -> None:
        self._root, self._run, self._client_id = root, run, client_id
        self._writer, self._recorder, self._timeout_s = writer, recorder, timeout_s

    def run(
        self, state: MutableMapping[Any, Any], *, step: int | None, source: str | os.PathLike[str] | None,
        only: Collection[str] | None, strict: bool, verify_first: bool,
    ) -> Resumed | None:  # fmt: skip
        """See Client.restore."""
        writer = self._writer
        slots = EarlierSlots(
            self._root,
            self._run,
            self._client_id,
            waiting=writer.waiting,
            slot_dir=writer.slot_dir,
            step=step,
        )
        with slots:
            self._await_earlier(slots if source is None else None)
            with HeldBack():
                how: dict[str, Any] = {
                    "run_id": writer.run_id, "only": only, "strict": strict, "knows": self._recorder.knows,
                    "verify_first": verify_first,
                }  # fmt: skip
                resumed = self._restore(slots.found, state, how, step=step, source=source)
                bases = slots.found.bases if slots.found is not None and resumed and resumed.staged else ()
                if slots.found is not None and resumed and resumed.staged:
                    writer.inherit(slots.found.accepted)
                self._recorder.go_on_from(resumed, fits=strict and only is None, before=bases)
        # Without a daemon now the state is restored all the same; saving will look for one again.
        with contextlib.suppress(NoDaemon, TimedOut):
            self._recorder.reserve(state)
        return resumed

    def _restore(
        self, staged: StagedSnapshot | None, state: MutableMapping[Any, Any], how: dict[str, Any], *,
        step: int | None, source: str | os.PathLike[str] | None,
    ) -> Resumed | None:  # fmt: skip
        if staged is None:
            return restore(self._root, self._run, state, step=step, source=source, **how)
        resumed = restore_from_slot(staged, state, **how)
        if isinstance(resumed, Resumed):
            return resumed
        torn = isinstance(resumed, RestoreTorn)
        if torn:
            warn_after_all()  # one that is an error must not leave the state as it is now
        newest = f"step {staged.accepted.descriptor.step}"
        warn(f"{newest} can't be restored from its slot, the disk is waited for: {resumed}")
        try:
            self._await_earlier()
            found = restore(self._root, self._run, state, step=step, source=source, **how)
            if found is None and torn:  # no fresh start: a part of the newest is in the state
                raise NothingThere("there is no checkpoint", where=f"run {self._run}")
            return found
        except CkptdError as error:
            if not torn:
                raise
            raise RestoreFailed(
                f"{newest} was torn, and nothing else could be restored", where=f"run {self._run}",
                state_touched=True, seen=f"{resumed}; then {type(error).__name__}: {error}",
                todo="make the objects anew before training on",
            ) from error  # fmt: skip

    def _await_earlier(self, slots: EarlierSlots | None = None) -> None:
        failed = self._writer.await_earlier(self._timeout_s, slots)
        if failed and (slots is None or slots.found is None):
            warn(
                f"run {self._run}: {failed} snapshot(s) of an earlier client could not be written and may be "
                "newer than what is restored now; look with: ckptd status"
            )
