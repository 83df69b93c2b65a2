"""What earlier clients of the run left in slots: the newest of it is restored from there, before it is on disk.

A restore gives what it would give once the daemon has written everything; so it comes from a slot only where that is
sure: the daemon says which snapshots wait, in which slots, and the newest of them becomes the head of the line. Where
anything is in doubt the restore waits for the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckptd.disk.rootdir import Root
from ckptd.disk.series_entries import Series, read_series
from ckptd.disk.staged_line import Accepted, bases_of_last, becomes_head
from ckptd.errors import CkptdError, ProtocolError
from ckptd.limits import MAX_BASES
from ckptd.link.wire import WaitingSnapshot
from ckptd.names import parse_step_folder, step_folder
from ckptd.snapshot.descriptor_codec import decode
from ckptd.snapshot.sealed_slot import SealedSlot
from ckptd.warning import warn

__all__ = ["EarlierSlots", "StagedSnapshot", "accepted_in"]

_ASK_EVERY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """The newest snapshot of a run, in its slot.

    Attributes:
        slot: The slot, open and proven.
        accepted: Its sequence and its descriptor.
        bases: What it goes on from, nearest first; see Descriptor.base_before.
        path: The folder that it is to become.
    """

    slot: SealedSlot
    accepted: Accepted
    bases: tuple[int, ...]
    path: Path


class EarlierSlots:
    """Looks whether the newest snapshot of the run can be restored from its slot. A context manager.

    Args:
        root: The root.
        run: The run's name.
        client_id: Of the client that asks: its own snapshots are none of an earlier one.
        waiting: Asks the daemon which snapshots of the run wait; None when it doesn't say.
        slot_dir: Tells where the slots lie.
        step: The step that is asked for; None for the newest.
    """

    def __init__(
        self, root: Root, run: str, client_id: str, *, waiting: Callable[[], Sequence[WaitingSnapshot] | None],
        slot_dir: Callable[[], Path], step: int | None = None,
    ) -> None:  # fmt: skip
        self._root, self._run, self._client_id, self._step = root, run, client_id, step
        self._waiting, self._slot_dir = waiting, slot_dir
        self._open = ExitStack()
        self._ask_at = 0.0
        self._given_up = False
        self.coming = False  #: there is one, and its proof isn't made yet
        self.found: StagedSnapshot | None = None

    def __enter__(self) -> EarlierSlots:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def look(self) -> bool:
        """Whether it is `found`. Cheap when called often."""
        if self.found is None and not self._given_up and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_EVERY_S
            self._open.close()
            try:
                self._look()
            except (OSError, CkptdError) as error:  # nothing is lost: it is waited for
                self.coming, self._given_up = False, True
                warn(f"run {self._run}: the newest snapshot can't be restored from its slot: {error}")
        return self.found is not None

    def _look(self) -> None:
        self.coming = False
        told = self._waiting()
        if not told or len(told) > MAX_BASES or any(one.client_id == self._client_id for one in told):
            return
        slots = self._slots(told)
        if slots is None:
            return
        self.coming = not slots[-1].is_proven()
        if not self.coming:
            self._decide([accepted_in(slot) for slot in slots], slots[-1])

    def _slots(self, told: Sequence[WaitingSnapshot]) -> list[SealedSlot] | None:
        """Their slots, open; None when one lies in no file, or is done with meanwhile."""
        slots = []
        for one in told:
            if not one.slot or Path(one.slot).name != one.slot:
                return None
            try:
                slot = self._open.enter_context(SealedSlot(self._slot_dir() / one.slot))
            except (FileNotFoundError, ProtocolError):
                return None
            header = slot.header
            seen = (header.run, header.client_id, header.snapshot, header.sequence)
            if seen != (self._run, one.client_id, one.snapshot, one.sequence):
                return None
            slots.append(slot)
        return slots

    def _decide(self, accepted: Sequence[Accepted], slot: SealedSlot) -> None:
        last = accepted[-1]
        if self._step not in (None, last.descriptor.step):
            return
        series = read_series(self._root, self._run)
        bases = bases_of_last(series, accepted)
        if bases is not None and becomes_head(series, last):
            self.found = StagedSnapshot(slot, last, bases, _folder_of_last(series, accepted))


def accepted_in(slot: SealedSlot) -> Accepted:
    """What lies in a slot.

    Raises:
        ProtocolError: Its descriptor is damaged, or of another snapshot than the header names.
        OSError: It can't be read.
    """
    header, d = slot.header, decode(slot.descriptor())
    said = (header.run, header.client_id, header.snapshot, header.data_bytes)
    seen = (d.run, d.client_id, d.snapshot, d.data_bytes)
    if said != seen:
        raise ProtocolError("the descriptor is of another snapshot", seen=str(seen), wanted=str(said))
    return Accepted(header.sequence, d)


def _folder_of_last(series: Series, accepted: Sequence[Accepted]) -> Path:
    """The folder that the last one is to become, when those before it are written first."""
    step = accepted[-1].descriptor.step
    on_disk = [parse_step_folder(entry.name) for entry in series.entries]
    highest = max((held[1] for held in on_disk if held is not None and held[0] == step), default=0)
    return series.run_dir / step_folder(step, highest + sum(one.descriptor.step == step for one in accepted))
