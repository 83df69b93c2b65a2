"""Restoring the newest snapshot of a run from the slot in which a killed trainer left it."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from dataclasses import replace
from typing import Any

from ckptd.disk.entry import MACHINE_ERRORS
from ckptd.disk.slot_reader import SlotReader
from ckptd.errors import (
    CkptdError,
    CorruptCheckpoint,
    ReadFailed,
    RestoreTorn,
    UnknownSchema,
    UnstorableState,
)
from ckptd.format.records import CheckpointIndex
from ckptd.link.earlier import StagedSnapshot
from ckptd.link.resume import apply
from ckptd.link.resumed import Resumed
from ckptd.tensors.loading import load_reader
from ckptd.tensors.restoring import normal_tensors

__all__ = ["restore_from_slot"]


def restore_from_slot(
    staged: StagedSnapshot, state: MutableMapping[Any, Any], *, run_id: str, only: Collection[str] | None,
    strict: bool, knows: Callable[[CheckpointIndex], bool], verify_first: bool = False,
) -> Resumed | CkptdError:  # fmt: skip
    """Restore it, or say why it can't be: then the disk must be waited for. A RestoreTorn has touched the state.

    All bytes are proven before the first of them reaches the state.

    Raises:
        ReadFailed: There are no descriptors or no memory left. The state is untouched.
        StateMismatch: The snapshot is whole and doesn't fit the state, which is untouched.
    """
    sequence, descriptor = staged.accepted.sequence, staged.accepted.descriptor
    with normal_tensors():
        try:
            reader = SlotReader(staged.slot, descriptor, run_id=run_id, sequence=sequence, only=only)
            # What the next one lacks keeps its value if that isn't strict: nothing may be in it by then.
            loaded = load_reader(reader, only, lazily=strict and not verify_first)
            resumed = apply(state, loaded, staged.path, run_id, only, strict, knows, ())
        except (CorruptCheckpoint, UnknownSchema, UnstorableState, RestoreTorn) as error:
            return error
        except ReadFailed as error:
            if error.errno in MACHINE_ERRORS:
                raise
            return error
        if not staged.slot.holds():
            return RestoreTorn("the slot was filled again while it was read", where=str(staged.slot.path))
    return replace(resumed, staged=True)
