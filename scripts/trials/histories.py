"""Histories: trainers, daemons and a disk to which random things happen, judged by a checker with a model of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from part import Deadline, Findings, Part

from history_checker import check
from history_log import in_words
from history_world import World

_DEEDS = 400
_AT_A_TIME = 20


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    """One history after the other, each of its own seed, until the time is over."""
    deadline = Deadline(minutes)
    while True:
        here = folder / f"history-{seed}"
        here.mkdir()
        faults = one(here, seed, deadline, findings)
        for fault in faults:
            findings.fault(fault, f"seed {seed}, log in {here}")
        if not faults:
            shutil.rmtree(here)
        seed += 1
        if deadline.over():
            return


def one(folder: Path, seed: int, deadline: Deadline, found: Findings) -> list[str]:
    """Live one history and judge it; what is wrong is told in its folder in words too."""
    with World(folder, seed) as world:
        for _ in range(_DEEDS // _AT_A_TIME):
            world.live(_AT_A_TIME)
            if deadline.over():
                break
        events = world.end()
        died = world.died()
    found.tried += world.done
    found.tried["snapshots"] += len({event["identity"] for event in events if event["op"] == "snapshot"})
    found.tried["restores"] += sum(event["op"] == "restore" for event in events)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    faults = check(events) + [f"a trainer ended by itself: {said}" for said in died]
    (folder / "in_words").write_text(in_words(events, faults, folder / "root"))
    return faults


PART = Part("histories", "random histories of several runs and clients, judged by a separate model", run)
