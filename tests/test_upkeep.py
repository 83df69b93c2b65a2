"""Retention and the run's index in runs of thousands: seldom, in parts, and never owed for ever."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.disk.rootdir import Root
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.core.upkeep import AT_ONCE_UP_TO, Upkeep
from ckptd_daemon.series import pruning
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import Settings
from fake_catalogue import FakeCatalogue
from made_series import Made

KEEP_LAST = RetentionPolicy(keep_last=1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_small_run_is_kept_up_at_once() -> None:
    upkeep = Upkeep(Clock())
    for _ in range(3):
        assert upkeep.owe("r", retention=True)
        assert upkeep.begin("r")
        upkeep.end("r", AT_ONCE_UP_TO, more=False)
    assert upkeep.due() == []


def test_a_large_run_is_kept_up_once_in_a_while_and_nothing_owed_to_it_is_forgotten() -> None:
    clock = Clock()
    upkeep = Upkeep(clock)
    assert upkeep.owe("r", retention=False)
    assert not upkeep.begin("r")
    upkeep.end("r", 10_000, more=False)
    assert not upkeep.owe("r", retention=True)
    assert not upkeep.owe("r", retention=False)
    assert upkeep.owe("another", retention=False)
    clock.now += 9.9
    assert upkeep.due() == ["another"]
    clock.now += 0.2
    assert upkeep.due() == ["r", "another"]
    assert upkeep.begin("r")
    assert upkeep.due() == ["another"]


def test_what_retention_has_left_is_due_in_the_next_job() -> None:
    upkeep = Upkeep(Clock())
    upkeep.owe("r", retention=True)
    upkeep.begin("r")
    upkeep.end("r", 10_000, more=True)
    assert upkeep.due() == ["r"]
    assert upkeep.begin("r")


class LargeRun(FakeCatalogue):
    listed = 10_000


def disk(tmp_path: Path, events: list[str]) -> Disk:
    def catalogue(_root: Root, run: str) -> Any:
        return LargeRun(run, events)

    return Disk(Root.open(tmp_path, create=True), Settings(), catalogue=catalogue)


def test_a_large_run_is_not_gone_through_at_every_verdict_unless_room_is_waited_for(tmp_path: Path) -> None:
    events: list[str] = []
    made = disk(tmp_path, events)
    report: Any = SimpleNamespace(name="step-000000001")
    assert made.judge("r", report).verdict == "verified"
    assert events == []
    made.sum_up("r")
    assert events == ["retention", "index"]
    made.judge("r", report)
    made.sum_up("r")
    assert events == ["retention", "index"]
    made.sum_up("r", at_once=True)
    assert events == ["retention", "index"] * 2


def test_what_is_owed_to_a_large_run_is_done_from_the_loop_once_it_is_due(tmp_path: Path) -> None:
    events: list[str] = []
    made = disk(tmp_path, events)
    clock = Clock()
    made._upkeep = Upkeep(clock)
    for _ in range(2):
        made.sum_up("r")
    assert events == ["index"]
    made.catch_up()
    clock.now += 60
    made.catch_up()
    made.catch_up()  # once, while that is under way
    made.worker.start()
    made.worker.stop()
    assert events == ["index"] * 2


def test_thousands_to_remove_go_in_parts_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "MOST_AT_ONCE", 2)
    made = Made(tmp_path / "root")
    for step in range(1, 6):
        made.commit(step, verify=True)
    gone = [[removed.step for removed in made.catalogue.apply_retention(KEEP_LAST)] for _ in range(3)]
    assert gone == [[1, 2], [3, 4], []]
    assert made.names == ["step-000000005"]
