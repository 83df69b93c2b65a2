"""What the trainers wrote down before they were killed, and what lies in shared memory and on disk."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.errors import CkptdError
from ckptd.names import parse_work_folder
from ckptd.slots import Slot

Key = tuple[str, int]  # client id, its snapshot number


@dataclass
class Journals:
    """All journals of one torture; read() goes on where it stopped.

    Attributes:
        folder: Where they are.
        begun: Snapshots that trainers began.
        sealed: snapshot() returned: (client, snapshot) → digest of the state at the call.
        acked: The client was told that it is durable: (client, snapshot) → sequence.
        failed: The client was told that it isn't: never expected here.
        resumed: Steps that trainers resumed from; None for a fresh start.
    """

    folder: Path
    begun: int = 0
    sealed: dict[Key, str] = field(default_factory=dict)
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

    def _take(self, event: dict[str, Any]) -> None:
        key = (event["client"], event.get("snapshot", 0))
        match event["event"]:
            case "begin":
                self.begun += 1
            case "sealed":
                self.sealed[key] = event["digest"]
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


def slot_states(shm: Path) -> Counter[str]:
    """How many slots under the shared-memory folder are in which state."""
    states: Counter[str] = Counter()
    for path in shm.glob("*/slot-*"):
        try:
            slot = Slot.open(path)
        except (CkptdError, OSError):
            states["unreadable"] += 1
            continue
        try:
            states[slot.header().state.name.lower()] += 1
        except CkptdError:
            states["unreadable"] += 1
        finally:
            slot.close()
    return states


def left_over(folder: Path) -> list[str]:
    """Every file below a folder that should be empty by now."""
    return [str(path) for path in sorted(folder.rglob("*")) if not path.is_dir()]
