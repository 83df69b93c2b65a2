"""For tests: a job run whole with a checkpoint after every step, and run again from each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import ckptd
from ckptd.tensors.restoring import apply_state
from sweep_trace import differences, told

#: What one step shows: its losses, sample ids and rates, and everything that is in the state after it.
Shown = dict[str, str]


class Job(Protocol):
    """A training script in a bottle."""

    state: dict[str, Any]

    def run(self, until: str, after: Callable[[str, Any], None]) -> None:
        """Train to a place: "7" is after step 7, "7 edge" between the epoch that ended there and the next.
        after(place, what it shows) is called at each."""


@dataclass
class Sweep:
    """One job, uninterrupted, and what it left.

    Attributes:
        make: A job of its own, everything in it new.
        steps: Its length.
        trace: Where → what it showed there; "0" is before the first step.
    """

    make: Callable[[], Job]
    folder: Path
    steps: int
    sharding: ckptd.Sharding = field(default_factory=ckptd.Sharding)
    trace: dict[str, Shown] = field(default_factory=dict)
    saved: int = 0

    def whole(self, *, save: bool = True) -> None:
        """Run it uninterrupted; with a checkpoint at every place."""
        seed(1)
        job = self.make()
        self.trace = {"0": told(job.state)}
        self._save(job, "0", save)

        def after(where: str, shown: Any) -> None:
            self.trace[where] = seen(job, shown)
            self._save(job, where, save)

        job.run(str(self.steps), after)

    def _save(self, job: Job, where: str, save: bool) -> None:
        if save:
            ckptd.save(self.folder / where, job.state, step=step_of(where), sharding=self.sharding)

    @property
    def cuts(self) -> list[str]:
        """Every place but the end, in order."""
        return [where for where in self.trace if step_of(where) < self.steps]

    def state_of(self, where: str) -> Shown:
        """What the state alone tells there."""
        return {path: text for path, text in self.trace[where].items() if path != "shown"}

    def resumed(self, path: Path) -> Job:
        """A new process as far as the state can tell: other seeds, everything made anew, restored."""
        return self._made_with(ckptd.load(path), 12345 + len(path.name))

    def _made_with(self, state: Mapping[str, Any], number: int) -> Job:
        seed(number)
        job = self.make()
        random.gauss(0, 1), np.random.standard_normal(3), torch.randn(3)
        apply_state(job.state, state)
        return job

    def check(self, *cuts: str) -> None:
        """Cut at the first place, restore, go on to the second, and so on, then to the end: all is as uninterrupted.

        Raises:
            AssertionError: It isn't; the message says where first and in which values.
        """
        path = self.folder / cuts[0]
        for cut, end in zip(cuts, (*cuts[1:], str(self.steps)), strict=True):
            job = self.resumed(path)
            self._same(told(job.state), self.state_of(cut), f"restored at {cut}")
            path = self._go_on(job, cut, end, cuts)

    def _go_on(self, job: Job, cut: str, end: str, cuts: Iterable[str]) -> Path:
        wanted = iter(list(self.trace)[list(self.trace).index(cut) + 1 :])
        self.saved += 1
        path = self.folder / f"again-{self.saved}"

        def after(where: str, shown: Any) -> None:
            due = next(wanted)
            assert where == due, f"cut at {cuts}: {where} comes, uninterrupted {due}"
            self._same(seen(job, shown), self.trace[where], f"cut at {cuts}, at {where}")
            if where == end and end != str(self.steps):
                ckptd.save(path, job.state, step=step_of(where), sharding=self.sharding)

        job.run(end, after)
        return path

    def shown_from(self, state: Mapping[str, Any]) -> list[str]:
        """What each step shows of a run that goes on from a loaded state, whatever is in it."""
        shown: list[str] = []
        self._made_with(state, 99).run(str(self.steps), lambda where, what: shown.append(repr(what)))
        return shown

    def _same(self, found: Shown, wanted: Shown, what: str) -> None:
        assert found == wanted, f"{what}: {differences(found, wanted)}"


def seen(job: Job, shown: Any) -> Shown:
    return {"shown": repr(shown), **told(job.state)}


def step_of(where: str) -> int:
    return int(where.partition(" ")[0])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
