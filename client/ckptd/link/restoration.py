"""A client's restore: from the slot of an earlier client where the newest snapshot still lies, else from the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from ckptd.disk.rootdir import Root
from ckptd.errors import NoDaemon, SharedMemoryTooSmall, TimedOut
from ckptd.link.earlier import EarlierSlots, StagedSnapshot
from ckptd.link.from_slot import restore_from_slot
from ckptd.link.recorder import Recorder
from ckptd.link.resume import restore
from ckptd.link.resumed import Resumed
from ckptd.link.writers import Writer
from ckptd.warning import HeldBack, warn

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
                resumed = self._from_slot(slots.found, state, only=only, strict=strict)
                bases = () if resumed is None or slots.found is None else slots.found.bases
                if resumed is None:
                    resumed = restore(
                        self._root, self._run, state, run_id=writer.run_id, step=step, source=source, only=only,
                        strict=strict, knows=self._recorder.knows, verify_first=verify_first,
                    )  # fmt: skip
                self._recorder.go_on_from(resumed, fits=strict and only is None, before=bases)
        # Without a daemon now the state is restored all the same; saving will look for one again.
        with contextlib.suppress(NoDaemon, TimedOut):
            self._reserve(state, wait=resumed is not None and resumed.staged)
        return resumed

    def _from_slot(
        self, staged: StagedSnapshot | None, state: MutableMapping[Any, Any], *,
        only: Collection[str] | None, strict: bool,
    ) -> Resumed | None:  # fmt: skip
        if staged is None:
            return None
        resumed = restore_from_slot(
            staged, state, run_id=self._writer.run_id, only=only, strict=strict, knows=self._recorder.knows
        )
        if resumed is None:
            self._await_earlier()
        return resumed

    def _await_earlier(self, slots: EarlierSlots | None = None) -> None:
        failed = self._writer.await_earlier(self._timeout_s, slots)
        if failed and (slots is None or slots.found is None):
            warn(
                f"run {self._run}: {failed} snapshot(s) of an earlier client could not be written and may be "
                "newer than what is restored now; look with: ckptd status"
            )

    def _reserve(self, state: Mapping[Any, Any], *, wait: bool) -> None:
        """wait: the slot it came from may have to be written before there is memory for others."""
        try:
            self._recorder.reserve(state)
        except SharedMemoryTooSmall:
            if not wait:
                raise
            self._await_earlier()
            self._recorder.reserve(state)
