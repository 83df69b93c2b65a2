"""Every state that a crash may leave of every story of tests/crash_stories.py, as many as there is time for.

What runs with the suite, and more: larger samples of what a power cut may leave, with another seed each round; crashes
in the middle of the recoveries from them; each single sync taken out, or done only after the next rename.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from part import Deadline, Findings, Part, say

from crash_barriers import REDUNDANT, SOMETIMES, each_sync
from crash_judge import faults, recover
from crash_place import Ground
from crash_record import record
from crash_seen import Eye
from crash_states import State, states
from crash_stories import STORIES, killed_before
from crash_trace import Trace

_MOST: Final = 40  #: power-cut states at each point of a trace, beside those that are always tried


class _Exploration:
    def __init__(self, minutes: float, seed: int, folder: Path, findings: Findings) -> None:
        self.findings, self.deadline = findings, Deadline(minutes)
        self._folder, self._dice, self._seed = folder, random.Random(seed), seed
        self._eye = Eye(folder / "state", folder / "shm")

    def run(self) -> None:
        traces = {name: self._traced(name) for name in STORIES}
        self._syncs(traces)
        rounds = 0
        while not (rounds and self.deadline.over()):
            for name, trace in traces.items():
                self._story(name, trace, self._seed + rounds)
            self._killed()
            rounds += 1

    def _traced(self, name: str) -> Trace:
        (self._folder / name).mkdir()
        return record(STORIES[name], self._folder / name)

    def _story(self, name: str, trace: Trace, seed: int) -> None:
        with_work = []
        for state in states(trace, most=_MOST, seed=seed):
            self._judge(name, state, seed)
            if any("/.tmp-" in path or "/.trash-" in path for path in state.tree) or state.memory:
                with_work.append(state)
            if self.deadline.over() and self.findings.tried["states"] > 1000:
                return
        for state in self._dice.sample(with_work, min(10, len(with_work))):
            self._recovery(name, state, seed)

    def _judge(self, name: str, state: State, seed: int) -> None:
        self.findings.tried["states"] += 1
        self.findings.tried[f"{state.kind} states"] += 1
        found = faults(state, self._eye)
        self.findings.tried["distinct trees looked at"] = self._eye.looked
        for fault in found[:1]:
            self.findings.fault(
                f"{name}, cut {state.cut} ({state.kind}): {fault}; on disk: {sorted(state.tree)}",
                f"scripts/torture --only crash --seed {seed}",
            )

    def _recovery(self, name: str, state: State, seed: int) -> None:
        memory = self._folder / "recovering.memory"
        Ground(memory, memory).lay_out(state.memory)
        folder = self._folder / "recovering"
        Ground(folder, folder / "fresh" / "root").lay_out(state.tree)
        trace = record(recover, folder, told=state.told, ids_from=10_000)
        self.findings.tried["recoveries that crash"] += 1
        for after in states(trace, most=2, seed=seed):
            self._judge(f"recovery from {name}, cut {state.cut}", after, seed)

    def _killed(self) -> None:
        at = self._dice.randrange(1, 60)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            told = Path(folder) / "told"
            told.mkdir()
            trace = record(lambda recorder, below: killed_before(recorder, below, at), told)
        for state in states(trace, most=2):
            self._judge(f"killed before operation {at}", state, at)

    def _syncs(self, traces: dict[str, Trace]) -> None:
        found: dict[str, Counter[str]] = {}
        for trace in traces.values():
            for barrier, words in each_sync(trace, self._eye, most=200).items():
                found.setdefault(barrier, Counter()).update(words)
                self.findings.tried["syncs taken out"] += len(words)
        for barrier, counted in sorted(found.items()):
            say(f"  {barrier}: {dict(counted)}")
            if counted["not needed"] and barrier not in REDUNDANT and barrier not in SOMETIMES:
                self.findings.fault(f"a sync that nothing needs: {barrier}: {dict(counted)}")
        self.findings.numbers["syncs"] = {barrier: dict(counted) for barrier, counted in found.items()}


def run(minutes: float, seed: int, folder: Path, findings: Findings) -> None:
    """As many states as there is time for, each story at least once."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir=os.environ["CKPTD_SHM_DIR"]) as memory:
        _Exploration(minutes, seed, Path(memory), findings).run()


PART = Part("crash", "every state that a kill or a power cut may leave on the disk", run)
