"""What must hold after all the killing. Each check returns all the faults it found, not the first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from evidence import Journals, Key
from trainer import digest_of

import ckptd
from ckptd.disk.verification import check
from ckptd.errors import CkptdError
from ckptd.format.records import CheckpointIndex, read_index
from ckptd.names import parse_step_folder


@dataclass
class Found:
    """The checkpoints on disk, by the snapshot they hold."""

    by_key: dict[Key, list[tuple[Path, CheckpointIndex]]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)


def read_checkpoints(run_dir: Path) -> Found:
    """Every checkpoint folder of the run, with every hash checked."""
    found = Found()
    for path in sorted(run_dir.iterdir()):
        if parse_step_folder(path.name) is None:
            continue
        report = check(path)
        if not report.ok:
            found.faults.append(f"{path.name} is not valid: {'; '.join(report.faults)}")
            continue
        index = read_index(path)
        found.by_key[(int(index.metrics["trainer"]), index.snapshot)].append((path, index))
    return found


def acknowledged_are_there(found: Found, journals: Journals) -> list[str]:
    """Acknowledged means durable, under the sequence that was told."""
    faults = []
    for key, sequence in journals.acked.items():
        there = [index.sequence for _, index in found.by_key.get(key, [])]
        if sequence not in there:
            faults.append(f"snapshot {key} was acknowledged as {sequence}, on disk: {there or 'nothing'}")
    faults += [f"a snapshot failed: {failed}" for failed in journals.failed]
    waiting = [key for key in journals.gone if _policy(key, journals) == "wait"]
    return faults + [f"snapshot {key} of a trainer that waits was {journals.gone[key]}" for key in waiting]


def sealed_are_written_once(found: Found, journals: Journals) -> list[str]:
    """Each sealed snapshot exactly once, unless it gave way; and nothing twice that didn't."""
    faults = []
    for key in journals.taken:
        there = [path.name for path, _ in found.by_key.get(key, [])]
        lost = key in journals.sealed and key not in journals.gone and not journals.may_have_given_way(key)
        if len(there) > 1 or (lost and not there):
            faults.append(f"snapshot {key} was {_state(key, journals)}, on disk {len(there)} times: {there}")
    return faults


def what_gave_way_is_not_there(found: Found, journals: Journals) -> list[str]:
    """What was said to be skipped or superseded is never a checkpoint."""
    return [
        f"snapshot {key} was {state}, and is on disk as {found.by_key[key][0][0].name}"
        for key, state in journals.gone.items()
        if key in found.by_key
    ]


def contents_are_as_taken(found: Found, journals: Journals) -> list[str]:
    """Every checkpoint holds what the state was when snapshot() was called."""
    faults = []
    for key, there in found.by_key.items():
        wanted = journals.taken.get(key)
        for path, _ in there:
            if wanted is not None and (seen := _digest(path)) != wanted:
                faults.append(
                    f"{path.name} holds another state than was taken: {seen[:12]}, wanted {wanted[:12]}"
                )
    return faults


def nothing_else_is_there(found: Found, journals: Journals) -> list[str]:
    """A checkpoint nobody took can only be one whose trainer died between sealing and writing that down."""
    extra = [key for key in found.by_key if key not in journals.taken]
    faults = [f"snapshot {key} is on disk twice" for key in extra if len(found.by_key[key]) > 1]
    trainers = [trainer for trainer, _ in extra]
    faults += [
        f"trainer {t} never took two of its checkpoints" for t in set(trainers) if trainers.count(t) > 1
    ]
    return faults


def sequences_are_in_order(found: Found) -> list[str]:
    """No sequence twice; one trainer's snapshots in the order in which they were taken."""
    all_of_them = [(*key, index.sequence) for key, there in found.by_key.items() for _, index in there]
    sequences = [sequence for _, _, sequence in all_of_them]
    faults = [f"sequence {s} was given twice" for s in set(sequences) if sequences.count(s) > 1]
    ordered = sorted(all_of_them)
    for (trainer, _, before), (other, snapshot, after) in pairwise(ordered):
        if trainer == other and after <= before:
            faults.append(
                f"snapshot {(trainer, snapshot)} has sequence {after}, its predecessor has {before}"
            )
    return faults


def _state(key: Key, journals: Journals) -> str:
    return "sealed" if key in journals.sealed else "taken"


def _policy(key: Key, journals: Journals) -> str:
    return str(journals.settings.get(key[0], {}).get("on_busy", "wait"))


def _digest(path: Path) -> str:
    try:
        loaded = ckptd.load(path)
    except CkptdError as error:
        return f"unreadable: {error}"
    return digest_of(loaded["model"], loaded["optimizer"]["state"], loaded["train"])
