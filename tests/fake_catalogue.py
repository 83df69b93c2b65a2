"""A catalogue and a writer that only remember what they were told, for tests of what is around them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckptd.snapshot.descriptor import Descriptor


class FakeCatalogue:
    """As ckptd_daemon.series.catalogue.Catalogue."""

    def __init__(self, run: str, events: list[str]) -> None:
        self.run, self.run_id, self.highest_sequence = run, "f" * 32, 0
        self.names: dict[tuple[str, int], str] = {}
        self.sequences: dict[str, int] = {}
        self.proved: set[str] = set()
        self.events = events
        self.verdict = "verified"

    holds_back = False

    @property
    def listed(self) -> int:
        return len(self.names)

    def note_newest(self) -> None:
        pass

    def open(self) -> list[str]:
        return []

    def position_for(self, descriptor: Descriptor, sequence: int) -> Any:
        return sequence

    def added(self, committed: Any) -> None:
        self.names[committed.key] = committed.name
        self.sequences[committed.name] = committed.sequence
        self.events.append(f"added {committed.name}")

    def find(self, client_id: str, snapshot: int) -> Any:
        name = self.names.get((client_id, snapshot))
        if name is None:
            return None
        return SimpleNamespace(name=name, sequence=self.sequences.get(name, 0), verified=name in self.proved)

    def is_overtaken(self, descriptor: Descriptor, sequence: int) -> bool:
        newer = [name for (client_id, n), name in self.names.items()
                 if client_id == descriptor.client_id and n > descriptor.snapshot]  # fmt: skip
        return any(self.sequences.get(name, 0) < sequence for name in newer)

    def unverified(self) -> list[str]:
        return sorted(set(self.names.values()) - self.proved)

    def rescan(self) -> list[str]:
        self.events.append("rescan")
        return []

    def apply_report(self, report: Any) -> str:
        self.proved.add(report.name)
        return self.verdict

    def apply_retention(self, policy: Any) -> list[Any]:
        self.events.append("retention")
        return []

    def write_index(self) -> None:
        self.events.append("index")

    def summary(self) -> dict[str, Any]:
        return {"checkpoints": len(self.names)}


class FakeCommit:
    """As ckptd.disk.commit.commit_snapshot: keeps the bytes, or raises the next of `errors`.

    Whoever has `held` makes it wait; `begun` says that it does.
    """

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.errors: list[Exception | None] = []
        self.held, self.begun = threading.Lock(), threading.Event()
        self.written: list[tuple[str, int, int, bytes]] = []  #: run, step, sequence, bytes

    def __call__(
        self, run_dir: Path, descriptor: Descriptor, data: memoryview, position: Any, /, **_how: Any
    ) -> Any:
        self.begun.set()
        with self.held:
            pass
        if self.errors and (error := self.errors.pop(0)) is not None:
            self.events.append(f"failed {descriptor.step}")
            raise error
        self.written.append((run_dir.name, descriptor.step, position, bytes(data)))
        name = f"step-{descriptor.step:09d}"
        self.events.append(f"committed {descriptor.step}")
        return SimpleNamespace(
            name=name,
            bytes=len(data),
            seconds=0.01,
            sequence=position,
            key=(descriptor.client_id, descriptor.snapshot),
            index=SimpleNamespace(run=run_dir.name, step=descriptor.step, sequence=position),
        )
