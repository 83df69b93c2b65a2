"""What the trainers wrote down before they were killed, and what lies in shared memory and on disk."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.errors import CkptdError
from ckptd.names import parse_work_folder
from ckptd.snapshot.slot_header import SlotState
from ckptd.snapshot.slots import Slot

Key = tuple[int, int]  # number of the trainer, of its snapshot


@dataclass
class Journals:
    """All journals of one torture; read() goes on where it stopped.

    Attributes:
        folder: Where they are.
        begun: How many snapshots each trainer began.
        taken: snapshot() returned: (trainer, snapshot) → digest of the state at the call.
        sealed: It lay in a slot, as its ticket said.
        gone: Its ticket said that it was skipped or superseded.
        settings: Each trainer's settings of its client.
        acked: The client was told that it is durable: (trainer, snapshot) → sequence.
        failed: The client was told that it isn't: never expected here.
        resumed: Steps that trainers resumed from; None for a fresh start.
    """

    folder: Path
    begun: Counter[int] = field(default_factory=Counter)
    taken: dict[Key, str] = field(default_factory=dict)
    sealed: set[Key] = field(default_factory=set)
    gone: dict[Key, str] = field(default_factory=dict)
    settings: dict[int, dict[str, Any]] = field(default_factory=dict)
    acked: dict[Key, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    resumed: list[int | None] = field(default_factory=list)
    _offsets: Counter[Path] = field(default_factory=Counter)

    def read(self) -> Journals:
        """Take in every complete line written since the last time."""
        for path in sorted(self.folder.glob("journal-*")):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] += len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))
        return self

    def may_have_given_way(self, key: Key) -> bool:
        """Whether a later snapshot() of its trainer may have taken its slot, and the trainer died before it knew."""
        trainer, snapshot = key
        policy = self.settings.get(trainer, {}).get("on_busy", "wait")
        return policy != "wait" and self.begun[trainer] > snapshot

    def _take(self, event: dict[str, Any]) -> None:
        key = (event["trainer"], event.get("snapshot", 0))
        match event["event"]:
            case "begin":
                self.begun[event["trainer"]] += 1
            case "settings":
                self.settings[event["trainer"]] = event["settings"]
            case "taken":
                self.taken[key] = event["digest"]
            case "sealed":
                self.sealed.add(key)
            case "gone":
                self.gone[key] = event["state"]
            case "acked":
                self.acked[key] = event["sequence"]
            case "failed":
                self.failed.append(f"{key}: {event['state']}")
            case "resumed":
                self.resumed.append(event["step"])


def temp_folders(run_dir: Path) -> list[str]:
    """Names of .tmp- and .trash- folders of the run."""
    if not run_dir.is_dir():
        return []
    return [path.name for path in run_dir.iterdir() if parse_work_folder(path.name)]


def being_written(run_dir: Path) -> bool:
    """Whether a snapshot is being written (sequence 0 is the run's index, a cache)."""
    work = [parse_work_folder(name) for name in temp_folders(run_dir)]
    return any(found is not None and found[0] == "tmp" and found[1] > 0 for found in work)


@contextlib.contextmanager
def open_slots(shm: Path) -> Iterator[list[Slot]]:
    """All slots under the shared-memory folder, open: looking at their states is then quick."""
    slots: list[Slot] = []
    for path in shm.glob("*/slot-*"):
        with contextlib.suppress(CkptdError, OSError):
            slots.append(Slot.open(path))
    try:
        yield slots
    finally:
        for slot in slots:
            slot.close()


def states_of(slots: list[Slot]) -> Counter[SlotState]:
    """How many slots are in which state; one whose header is just changing counts nowhere."""
    states: Counter[SlotState] = Counter()
    for slot in slots:
        with contextlib.suppress(CkptdError):
            states[slot.header().state] += 1
    return states


def left_over(folder: Path) -> list[str]:
    """Every file below a folder that should be empty by now."""
    return [str(path) for path in sorted(folder.rglob("*")) if not path.is_dir()]
