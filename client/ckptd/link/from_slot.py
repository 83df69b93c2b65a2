"""Restoring the newest snapshot of a run from the slot in which a killed trainer left it."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from dataclasses import replace
from typing import Any

from ckptd.disk.entry import MACHINE_ERRORS
from ckptd.disk.slot_reader import SlotReader
from ckptd.errors import CorruptCheckpoint, ReadFailed, UnknownSchema, UnstorableState
from ckptd.format.records import CheckpointIndex
from ckptd.link.earlier import StagedSnapshot
from ckptd.link.resume import apply
from ckptd.link.resumed import Resumed
from ckptd.tensors.loading import load_reader
from ckptd.tensors.restoring import normal_tensors
from ckptd.warning import warn

__all__ = ["restore_from_slot"]


def restore_from_slot(
    staged: StagedSnapshot, state: MutableMapping[Any, Any], *,
    run_id: str, only: Collection[str] | None, strict: bool, knows: Callable[[CheckpointIndex], bool],
) -> Resumed | None:  # fmt: skip
    """Restore it; None, said, when its bytes aren't those that were sealed: then the disk must be waited for.

    Raises:
        ReadFailed: There are no descriptors or no memory left. The state is untouched.
        StateMismatch: The snapshot is whole and doesn't fit the state, which is untouched.
    """
    accepted = staged.accepted
    with normal_tensors():
        try:
            reader = SlotReader(
                staged.slot, accepted.descriptor, run_id=run_id, sequence=accepted.sequence, only=only
            )
            loaded = load_reader(reader, only)
            reader.finish()
        except (CorruptCheckpoint, UnknownSchema, UnstorableState, ReadFailed) as error:
            if isinstance(error, ReadFailed) and error.errno in MACHINE_ERRORS:
                raise
            warn(
                f"step {accepted.descriptor.step} can't be restored from its slot, the disk is waited for: {error}"
            )
            return None
        resumed = apply(state, loaded, staged.path, run_id, only, strict, knows, ())
    return replace(resumed, staged=True)
