"""Contestants in turn: A B C, B C A, C A B … so that nobody always follows the same one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from samples import Samples


class Contestant(Protocol):
    """Whoever does a job that is timed.

    Attributes:
        name: As it is printed.
        about: What it does with which threads, and what it leaves undone.
        ours: A failure of it is one of the benchmark; a failure of others is theirs, and they are left out.
    """

    name: str
    about: str
    ours: bool

    def measure(self) -> dict[str, float]:
        """Do it once; seconds by measure."""

    def settle(self) -> None:
        """Undo it, not timed: the next one must find the disk as idle and as empty."""

    def close(self) -> None:
        """End it."""


class Course:
    """Runs sections and keeps their numbers.

    Attributes:
        samples: What was measured.
        about: Section → contestant → what it does.
        skipped: Who didn't take part, and why.
    """

    def __init__(self) -> None:
        self.samples = Samples()
        self.about: dict[str, dict[str, str]] = {}
        self.skipped: dict[str, str] = {}

    def run(self, section: str, contestants: Sequence[Contestant], rounds: int, warmups: int) -> None:
        """Measure all of them in each round; the warm-ups' numbers are thrown away. Closes them."""
        running = list(contestants)
        try:
            for number in range(warmups + rounds):
                say(f"{section}: round {number + 1 - warmups} of {rounds}")
                turn = number % max(1, len(running))
                for one in [*running[turn:], *running[:turn]]:
                    if not self._measure(section, one, counts=number >= warmups):
                        running.remove(one)
        finally:
            for one in contestants:
                one.close()
        self.about[section] = {one.name: one.about for one in running}

    def _measure(self, section: str, one: Contestant, *, counts: bool) -> bool:
        try:
            measures = one.measure()
            one.settle()
        except Exception as error:  # whatever a library of others throws
            if one.ours:
                raise
            self.skipped[one.name] = f"failed: {type(error).__name__}: {str(error)[:200]}"
            self.samples.drop(section, one.name)
            return False
        if counts:
            self.samples.add(section, one.name, measures)
        return True


def say(text: str) -> None:
    """Progress, on one line of a terminal; nothing into a pipe."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
