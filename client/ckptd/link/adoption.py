"""What killed trainers of a run left sealed in slots, written where no daemon does it: by who holds the root's lock.

As a daemon's start does: in the order in which it was accepted, each snapshot once, and only what nobody lives to
push again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial

from ckptd.disk.commit import commit_snapshot
from ckptd.disk.daemon_record import process_started
from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import position_after, read_series
from ckptd.disk.slot_folder import remove_slot_folder
from ckptd.disk.staged_line import Accepted, is_overtaken
from ckptd.errors import CkptdError
from ckptd.link.earlier import accepted_in
from ckptd.snapshot.sealed_slot import SealedSlot, sealed_slots
from ckptd.snapshot.slots import Slot, SlotHeader

__all__ = ["adopt_left", "sealed_headers"]


def sealed_headers(root: Root) -> list[SlotHeader]:
    """Headers of all snapshots that wait in slots of this root."""
    headers = []
    for slot in sealed_slots(root.slot_path):
        headers.append(slot.header)
        slot.close()
    return headers


def adopt_left(root: Root, run: str, run_id: str, next_sequence: int, say: Callable[[str], None]) -> None:
    """Commit what was left, and remove its slots. What can't be written now stays where it is, and is said.

    Args:
        root: The root, its lock held.
        run: The run's name.
        run_id: The run's id.
        next_sequence: The lowest sequence that no snapshot has.
        say: Told why something stays.
    """
    with contextlib.ExitStack() as opened:
        left = [opened.enter_context(slot) for slot in sealed_slots(root.slot_path, run)]
        for slot in sorted(left, key=_place):
            header = slot.header
            if _lives(header):
                say(
                    f"snapshot {header.snapshot} of a client that lives (pid {header.owner_pid}) waits in shared memory"
                )
                continue
            sequence = header.sequence or next_sequence
            try:
                _write(root, run_id, slot, sequence)
            except (CkptdError, OSError) as error:
                say(f"a snapshot of an earlier client waits in shared memory and can't be written: {error}")
            next_sequence = max(next_sequence, sequence + 1)
    with contextlib.suppress(OSError):  # somebody still needs what is in it
        remove_slot_folder(root.slot_path)


def _place(slot: SealedSlot) -> tuple[bool, int, str, int]:
    header = slot.header
    return header.sequence == 0, header.sequence, header.client_id, header.snapshot


def _lives(header: SlotHeader) -> bool:
    """Whether the process that filled it lives: it pushes it to the next daemon."""
    return header.owner_pid != 0 and process_started(header.owner_pid) == header.owner_started


def _write(root: Root, run_id: str, sealed: SealedSlot, sequence: int) -> None:
    descriptor = accepted_in(sealed).descriptor
    series = read_series(root, descriptor.run)
    slot = Slot.open(sealed.path)
    try:
        snapshot = (descriptor.client_id, descriptor.snapshot)
        written = any((d.client_id, d.snapshot) == snapshot for d in series.own)
        if not written and not is_overtaken(series, Accepted(sequence, descriptor)):
            position = position_after(series, descriptor, sequence, run_id=run_id)
            slot.mark_writing(sequence)
            with slot.data[: descriptor.data_bytes] as data:
                check = partial(slot.check, data, threads=len(os.sched_getaffinity(0)))
                commit_snapshot(root.run_dir(descriptor.run), descriptor, data, position, check=check)
        slot.release()
    finally:
        slot.close()
    sealed.path.unlink(missing_ok=True)
