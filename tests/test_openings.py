"""Runs opened for who attaches: one at a time, and each connection waits for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.errors import ProtocolError
from ckptd_daemon.core.disk import RunFacts
from ckptd_daemon.core.openings import Openings


class FakeDisk:
    """Keeps the jobs; `finish` does the first."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def submit(self, work: Callable[[], Any], done: Callable[[Any], None], *, urgent: bool) -> None:
        self.jobs.append((work, done))

    def open_run(self, run: str) -> RunFacts:
        return RunFacts(run_id=run, highest_sequence=0, problems=(), unverified=(), summary={})

    def finish(self) -> None:
        work, done = self.jobs.pop(0)
        done(work())


class Asked:
    """Openings on a fake disk, and what came of what was asked."""

    def __init__(self) -> None:
        self.disk, self.answers = FakeDisk(), list[tuple[str, RunFacts | Exception]]()
        self.openings = Openings(self.disk)  # type: ignore[arg-type]

    def ask(self, identity: bytes, run: str) -> None:
        self.openings.ask(identity, run, lambda facts: self.answers.append((run, facts)))

    def opened(self) -> list[str]:
        return [facts.run_id for _, facts in self.answers if isinstance(facts, RunFacts)]


def test_the_disk_has_one_run_to_open_at_a_time_however_many_attach() -> None:
    asked = Asked()
    for number in range(5):
        asked.ask(b"%d" % number, f"run-{number}")
        assert len(asked.disk.jobs) == 1
    while asked.disk.jobs:
        asked.disk.finish()
        assert len(asked.disk.jobs) <= 1
    assert asked.opened() == [f"run-{number}" for number in range(5)]


def test_a_connection_that_asks_a_thousand_times_has_one_place_in_the_queue() -> None:
    asked = Asked()
    asked.ask(b"modest", "first")
    for number in range(1000):
        asked.ask(b"greedy", f"run-{number}")
    asked.ask(b"modest", "second")
    for _ in range(3):
        asked.disk.finish()
    assert asked.opened() == ["first", "run-999", "second"] and not asked.disk.jobs
    replaced = [error for _, error in asked.answers if isinstance(error, Exception)]
    assert len(replaced) == 999 and all(isinstance(error, ProtocolError) for error in replaced)


def test_whoever_waits_next_is_served_though_the_one_before_fails_to_take_the_answer() -> None:
    asked = Asked()

    def fail(facts: RunFacts | Exception) -> None:
        raise OSError("gone")

    asked.openings.ask(b"a", "a", fail)
    asked.ask(b"b", "b")
    try:
        asked.disk.finish()
    except OSError:
        asked.disk.finish()
    assert asked.opened() == ["b"]
