"""What a daemon and its clients do until they are killed, told call by call, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ckptd.disk.rootdir import Root
from ckptd.disk.series import latest_valid
from ckptd.disk.verification import check
from ckptd.format.records import read_index
from ckptd.link import wire
from ckptd.names import parse_step_folder, parse_work_folder
from ckptd.snapshot.slots import Slot, SlotState
from desk_daemon import DeskClient, DeskDaemon
from snapshots import data_for, descriptor, sharded

RUN: Final = "default"
_KEEP_LAST: Final = (1, 2)
Key = tuple[str, int]  # client, number of its snapshot


@dataclass
class Told:
    """The journal: what was done and said before each kill, in whole lines.

    Attributes:
        steps: (client, number) → step of what a client began to seal.
        sealed: Those that were.
        states: Key → states that the client heard, in order.
        sequences: Key → the sequence it was committed under, as told.
        writing: Those that a commit began for, in order.
        written: Key → the sequence under which that ended well, told or not.
        accepted: Key → the sequences that its client was told at its acceptance.
    """

    steps: dict[Key, int] = field(default_factory=dict)
    sealed: list[Key] = field(default_factory=list)
    states: dict[Key, list[str]] = field(default_factory=lambda: defaultdict(list))
    sequences: dict[Key, int] = field(default_factory=dict)
    writing: list[Key] = field(default_factory=list)
    written: dict[Key, int] = field(default_factory=dict)
    accepted: dict[Key, set[int]] = field(default_factory=lambda: defaultdict(set))

    @classmethod
    def read(cls, path: Path, begin: int = 0) -> Told:
        told = cls()
        for line in path.read_bytes()[begin:].splitlines():
            what, client, number, *more = json.loads(line)
            told._take(what, (client, number), more)
        return told

    def _take(self, what: str, key: Key, more: list[Any]) -> None:
        if what == "sealing":
            self.steps[key] = more[0]
        elif what == "sealed":
            self.sealed.append(key)
        elif what == "writing":
            self.writing.append(key)
        elif what == "wrote":
            self.written[key] = more[0]
        elif what == "accepted":
            self.accepted[key].add(more[0])
        elif what == "told":
            self.states[key].append(more[0])
            if more[0] in ("committed", "verified"):
                self.sequences[key] = more[1]


def keep_last_of(seed: int) -> int:
    """What retention leaves in the story of that seed."""
    return random.Random(seed).choice(_KEEP_LAST)


class Teller:
    """Tells one story, from a seed: the same one each time.

    Args:
        path: The root.
        journal: Where it is written down; the process may be killed after any line.
        seed: Decides everything.
        pid: The process that the clients say they are: one that lives on, or this one.
    """

    def __init__(self, path: Path, journal: Path, seed: int, pid: int) -> None:
        self._path, self._pid = path, pid
        self._random = random.Random(seed)
        self._keep_last = self._random.choice(_KEEP_LAST)
        self._slots = self._random.choice((1, 2, 2))
        self._fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._append = os.write  # the real one: nothing of the journal counts
        self._clients, self._step, self._number = 0, 0, 0

    def tell(self, what: str, client: str, number: int, *more: Any) -> None:
        self._append(self._fd, json.dumps([what, client, number, *more]).encode() + b"\n")

    def first(self) -> None:
        """From a fresh root to a clean exit."""
        self._begin()
        self._come()
        self._save()
        for _ in range(self._random.randint(3, 5)):
            self._random.choice((self._save, self._save, self._queue, self._prove, self._come_again))()
        self._prove()
        self._end()

    def after(self, told: Told) -> None:
        """The next start: a trainer that lives comes back; then one more snapshot is saved, and all leave."""
        self._begin()
        last = told.sealed[-1][0] if told.sealed else ""
        if last and self._pid != os.getpid():
            self._come(client_id=last, number=max(number for client, number in told.steps if client == last))
            for key in told.sealed:
                if key[0] == last and not set(told.states[key]) & {"verified", "superseded"}:
                    self._accepted(key[1], self._client.push(self._client.slots[0], 2**40, key[1]))
        else:
            self._daemon.settle()
            self._come()
        self._step = max(told.steps.values(), default=0) + 10
        self._save()
        self._prove()
        self._end()

    def _begin(self) -> None:
        self._daemon = DeskDaemon(self._path, self._keep_last, self.tell)

    def _end(self) -> None:
        self._client.leave()
        self._daemon.settle()
        self._daemon.close()

    def _come(self, client_id: str = "", number: int = 0, base: int | None = None) -> None:
        self._clients += 1
        client_id = client_id or f"{os.getpid():016x}{self._clients:016x}"
        self._client = DeskClient(self._daemon, client_id, self._pid, slots=self._slots)
        self._number, self._base = number, base
        self._unpushed: list[tuple[Slot, int, int]] = []
        for slot in self._client.slots:
            if (
                slot.header().state is SlotState.FILLING
            ):  # its process was killed, though it is told to live on
                slot.release()

    def _come_again(self) -> None:
        """Another client, which restored the newest one or an older one."""
        self._daemon.settle(verify=self._random.random() < 0.5)
        self._client.leave()
        found = [entry.sequence for entry in entries(self._path)]
        self._come(base=self._random.choice([None, *found]) if found else None)

    def _prove(self) -> None:
        self._daemon.settle()

    def _save(self) -> None:
        if (slot := self._client.free()) is None:
            self._push_all()
            self._daemon.settle(verify=False)
            slot = self._client.free()
        self._seal(slot)
        if self._random.random() < 0.4:
            self._daemon.settle(verify=self._random.random() < 0.7)

    def _queue(self) -> None:
        """While the disk is busy snapshots queue up, and an older one gives way to a newer one."""
        self._push_all()
        self._daemon.settle(verify=False)
        free = threading.Event()
        self._daemon.submit(free.wait)
        for slot in self._client.slots:
            self._seal(slot)
        if self._random.random() < 0.6:
            number = self._number - len(self._client.slots) + 1
            self._client.give_way(number, 0)
            if (slot := self._client.free()) is not None:
                self._seal(slot)
        free.set()

    def _seal(self, slot: Slot | None) -> None:
        if slot is None:
            raise AssertionError("no slot is free")
        self._step, self._number = self._step + 1, self._number + 1
        make = self._random.choice((descriptor, sharded))
        client = self._client
        taken = make(
            self._step, client_id=client.client_id, snapshot=self._number, base_sequence=self._base, run=RUN
        )
        self.tell("sealing", client.client_id, self._number, self._step)
        generation = client.seal(slot, taken, bytes(data_for(self._step)))
        self.tell("sealed", client.client_id, self._number)
        self._unpushed.append((slot, generation, self._number))
        if self._random.random() < 0.9:  # else it comes later, or with its client's end
            self._push_all()

    def _push_all(self) -> None:
        while self._unpushed:
            slot, generation, number = self._unpushed.pop(0)
            self._accepted(number, self._client.push(slot, generation, number))

    def _accepted(self, number: int, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Accepted):
            self.tell("accepted", self._client.client_id, number, reply.sequence)


@dataclass(frozen=True)
class OnDisk:
    """One checkpoint folder."""

    name: str
    key: Key
    sequence: int
    step: int
    faults: tuple[str, ...]


def entries(root: Path) -> list[OnDisk]:
    """All of the run, every hash checked, in order."""
    run_dir = root / RUN
    found = []
    for path in sorted(run_dir.iterdir()) if run_dir.is_dir() else []:
        if parse_step_folder(path.name) is None:
            continue
        faults = list(check(path).faults)
        index = read_index(path)
        payload = b"".join(file.read_bytes() for file in path.glob("*.pt"))
        if bytes(data_for(index.step)[:256]) not in payload:
            faults.append(f"{path.name} doesn't hold the bytes of step {index.step}")
        key = (index.client_id, index.snapshot)
        found.append(OnDisk(path.name, key, index.sequence, index.step, tuple(faults)))
    return sorted(found, key=lambda entry: entry.sequence)


@dataclass
class Judge:
    """Looks after each kill, and at the end; the faults.

    Attributes:
        keep_last: What retention leaves.
    """

    root: Path
    journal: Path
    keep_last: int
    faults: list[str] = field(default_factory=list)
    _seen: dict[Key, int] = field(default_factory=dict)  # ever seen on disk or told → sequence
    _read: int = 0

    def look(self) -> None:
        """What holds at every instant, and of what a start has done since the last look."""
        before, news = dict(self._seen), Told.read(self.journal, self._read)
        self._read = self.journal.stat().st_size
        found = entries(self.root)
        self.faults += [f"{one.name}: {fault}" for one in found for fault in one.faults]
        for key in news.writing:
            if key in before or news.writing.count(key) > 1:
                self.faults.append(f"{key} was committed as {before.get(key)} and is written again")
        on_disk = {one.key: one.sequence for one in found}
        for key, sequence in (*on_disk.items(), *news.written.items(), *news.sequences.items()):
            if self._seen.setdefault(key, sequence) != sequence:
                self.faults.append(f"{key} has sequence {sequence}, before it was {self._seen[key]}")
        self.faults += self._missing(found) + self._wrongly_there(found) + list(_out_of_order(found))
        self._check_latest()

    def _missing(self, found: list[OnDisk]) -> Iterator[str] | list[str]:
        """What was acknowledged and isn't there, though retention can't have removed it."""
        there = {one.sequence for one in found}
        told = Told.read(self.journal)
        return [
            f"{key} was told to be {told.states[key]} as {sequence}; on disk are {sorted(there)}"
            for key, sequence in told.sequences.items()
            if sequence not in there and not any(newer > sequence for newer in there)
        ] + [
            f"retention kept {len(there)} of {len(told.sequences)}, wanted {self.keep_last}"
            for _ in [0]
            if len(there) < min(self.keep_last, len(told.sequences)) and not self._forked()
        ]

    def _forked(self) -> bool:
        return any("-fork-" in path.name for path in (self.root / RUN / "decisions").glob("*"))

    def _wrongly_there(self, found: list[OnDisk]) -> list[str]:
        told, keys = Told.read(self.journal), [one.key for one in found]
        faults = [f"{key} is on disk {keys.count(key)} times" for key in set(keys) if keys.count(key) > 1]
        for key, sequences in told.accepted.items():
            if not sequences <= {self._seen.get(key, min(sequences))}:
                faults.append(f"{key} was accepted as {sequences}, and became {self._seen.get(key)}")
        for key, states in told.states.items():
            if "failed" in states or "corrupt" in states:
                faults.append(f"{key} was told {states}")
            if "superseded" in states and (key in self._seen or key in told.writing):
                faults.append(f"{key} was told {states}, and was written")
        faults += [f"{one.key} was never sealed" for one in found if told.steps.get(one.key) != one.step]
        return faults

    def _check_latest(self) -> None:
        told = Told.read(self.journal).sequences.values()
        found = latest_valid(self.root, RUN) if (self.root / RUN).is_dir() else None
        if told and (found is None or found.sequence < max(told)):
            self.faults.append(f"latest is {found and found.name} after {max(told)} was acknowledged")

    def end(self) -> None:
        """After a start that nobody killed, and a clean exit."""
        told = Told.read(self.journal)
        for key in told.sealed:
            if key not in self._seen and "superseded" not in told.states[key]:
                self.faults.append(f"{key} was sealed and never written; it was told {told.states[key]}")
        last = told.sealed[-1]
        if last not in self._seen or latest_valid(self.root, RUN).sequence != self._seen[last]:  # type: ignore[union-attr]
            self.faults.append("the next save isn't the latest")
        self.faults += [
            f"left over: {path}"
            for path in self.root.rglob("*")
            if parse_work_folder(path.name) is not None or path.parent.name == "quarantine"
        ]
        slots = Root.for_reading(self.root).slot_path
        with contextlib.suppress(FileNotFoundError):
            self.faults += [f"shared memory left: {path}" for path in slots.iterdir()]


def _out_of_order(found: list[OnDisk]) -> Iterator[str]:
    for client in {one.key[0] for one in found}:
        numbers = [one.key[1] for one in found if one.key[0] == client]
        if any(after <= before for before, after in pairwise(numbers)):
            yield f"snapshots of one client lie in the order {numbers}"
