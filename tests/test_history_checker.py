"""The checker of histories bites: each kind of violation, in a log of a few lines, is told, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from history_checker import check
from history_log import in_words

Events = list[dict[str, Any]]


class Log:
    """Events one after the other, a second apart."""

    def __init__(self, keep_last: int = 2) -> None:
        self.events: Events = []
        self._now = 0.0
        self.add("policy", keep_last=keep_last)

    def add(self, op: str, **fields: Any) -> dict[str, Any]:
        self._now += 1.0
        event = {"op": op, "run": "r", "call": self._now, "ret": self._now + 0.5, **fields}
        self.events.append(event)
        return event

    def snapshot(
        self, identity: int, after: int | None, *, state: str = "staged", way: str = "slot", gives_way: bool = False
    ) -> None:  # fmt: skip
        self.add(
            "snapshot", identity=identity, step=identity, after=after, number=identity, state=state, way=way,
            gives_way=gives_way,
        )  # fmt: skip

    def killed_in(self, identity: int, after: int, *, gives_way: bool) -> None:
        asked = self.add("snapshot", identity=identity, step=identity, after=after, gives_way=gives_way)
        del asked["ret"]

    def told(self, identity: int, state: str, sequence: int | None = None) -> None:
        self.add("told", identity=identity, state=state, sequence=sequence)

    def saved(self, identity: int, after: int | None, sequence: int | None = None) -> None:
        self.snapshot(identity, after)
        self.told(identity, "committed", sequence or identity)

    def latest(self, identity: int | None, sequence: int | None = None, error: str = "") -> None:
        self.add("latest", answer=identity, sequence=sequence or identity, error=error)

    def restored(self, identity: int | None, **more: Any) -> None:
        self.add(
            "restore", **{"answer": identity, "sequence": identity, "staged": False, "wanted": None} | more
        )

    def final(self, *identities: int, op: str = "final", **changes: Any) -> None:
        found = [
            {
                "name": f"step-{one:09d}", "sequence": one, "client": "c", "snapshot": one, "identity": one,
                "step": one, "contents": [one, one], "whole": True,
            }
            for one in identities
        ]  # fmt: skip
        if found:
            found[-1] |= changes
        self.add(op, checkpoints=found)


def sound(log: Log) -> None:
    """Four on a line, the first two removed by retention; a restore, and a fork that leaves one behind."""
    log.saved(1, None)
    log.latest(1)
    log.saved(2, 1)
    log.saved(3, 2)
    log.latest(3)
    log.restored(2, wanted=2)
    log.saved(4, 2)
    log.latest(4)
    log.restored(4)
    log.saved(5, 4)
    log.add("hit", identity=5, what="damage", done=True)
    log.latest(4)
    log.final(4, 5, whole=False)


def test_a_sound_history_is_told_to_be_sound() -> None:
    log = Log()
    sound(log)
    assert check(log.events) == []


def lost(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1)
    log.final(2)


def lost_newest(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1)
    log.saved(3, 2)
    log.final(1, 2)


def lost_when_sealed(log: Log) -> None:
    log.saved(1, None)
    log.snapshot(2, 1)
    log.final(1)


def lost_before_a_call_that_only_waits(log: Log) -> None:
    lost_when_sealed(log)
    log.killed_in(3, 2, gives_way=False)


def lost_before_a_call_of_another_trainer(log: Log) -> None:
    lost_when_sealed(log)
    log.killed_in(10**6, 2, gives_way=True)


def lost_unheard_before_a_call_that_only_waits(log: Log) -> None:
    lost_when_sealed(log)
    log.told(2, "unknown")
    log.snapshot(3, 2)
    log.final(1, 3)


def lost_before_a_call_that_would_have_heard(log: Log) -> None:
    lost_when_sealed(log)
    log.snapshot(3, 2, gives_way=True)
    log.final(1, 3)


def back(log: Log) -> None:
    for one, after in ((1, None), (2, 1), (3, 2)):
        log.saved(one, after)
    log.latest(3)
    log.latest(2)
    log.final(2, 3)


def none_at_all(log: Log) -> None:
    log.saved(1, None)
    log.latest(None)
    log.final(1)


def an_error(log: Log) -> None:
    log.saved(1, None)
    log.latest(None, error="NoValidCheckpoint")
    log.final(1)


def a_fresh_start(log: Log) -> None:
    log.saved(1, None)
    log.restored(None)
    log.final(1)


def an_old_restore(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1)
    log.restored(1)
    log.final(1, 2)


def twice(log: Log) -> None:
    log.saved(1, None)
    log.final(1, 2, identity=1, snapshot=1)


def twice_over_time(log: Log) -> None:
    log.saved(1, None)
    log.final(1, op="listing")
    log.final(1, sequence=7)


def one_sequence_for_two(log: Log) -> None:
    log.saved(1, None)
    log.snapshot(2, 1)
    log.final(1, 2, sequence=1)


def refused(state: str) -> Any:
    def events(log: Log) -> None:
        log.saved(1, None)
        log.snapshot(2, 1, state="skipped" if state == "skipped" else "staged")
        if state != "skipped":
            log.told(2, state)
        log.final(1, 2)

    return events


def falling(log: Log) -> None:
    log.saved(1, None, 5)
    log.saved(2, 1, 4)
    log.add("final", checkpoints=[])


def falling_though_an_older_one_was_hit(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1)
    log.add("hit", identity=1, what="delete", done=True)
    log.saved(3, 2, 2)
    log.add("final", checkpoints=[])


def again_before_the_hit(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1, 1)
    log.add("hit", identity=1, what="delete", done=True)
    log.add("final", checkpoints=[])


def corrupt_by_itself(log: Log) -> None:
    log.saved(1, None)
    log.told(1, "corrupt", 1)
    log.final(1)


def of_nobody(log: Log) -> None:
    log.saved(1, None)
    log.final(1, 9)


def other_contents(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1)
    log.final(1, 2, contents=[1, 2])


def other_step(log: Log) -> None:
    log.saved(1, None)
    log.final(1, step=3)


def not_whole(log: Log) -> None:
    log.saved(1, None)
    log.final(1, whole=False)


def offered_though_damaged(log: Log) -> None:
    log.saved(1, None)
    log.saved(2, 1)
    log.add("hit", identity=2, what="damage", done=True)
    log.latest(2)
    log.final(1)


def mixed(log: Log) -> None:
    log.saved(1, None)
    log.restored(1, torn="[1, 2]")
    log.final(1)


@pytest.mark.parametrize(
    ("story", "fault"),
    [
        (lost, "1 was acknowledged as 1 and is lost"),
        (lost_newest, "3 was acknowledged as 3 and is lost"),
        (lost_when_sealed, "2 was sealed and is lost"),
        (lost_before_a_call_that_only_waits, "2 was sealed and is lost"),
        (lost_unheard_before_a_call_that_only_waits, "2 was sealed and is lost"),
        (lost_before_a_call_that_would_have_heard, "2 was sealed and is lost"),
        (lost_before_a_call_of_another_trainer, "2 was sealed and is lost"),
        (back, "latest answers 2, though 3 (3) was durable"),
        (none_at_all, "latest says there is none, though 1 (1) was durable"),
        (an_error, "latest NoValidCheckpoint, though 1 (1) was durable"),
        (a_fresh_start, "restore says there is none, though 1 (1) was durable"),
        (an_old_restore, "restore answers 1, though 2 (2) was durable"),
        (twice, "snapshot ('c', 1) committed twice"),
        (twice_over_time, "snapshot 1 committed twice: sequence 1, then 7"),
        (one_sequence_for_two, "sequence 1 twice"),
        (refused("failed"), "step-000000002 is 2, which was told to be failed"),
        (refused("superseded"), "told to be superseded"),
        (refused("skipped"), "told to be skipped"),
        (falling, "2 has sequence 4, asked after 1 had 5"),
        (falling_though_an_older_one_was_hit, "3 has sequence 2, asked after 2 had 2"),
        (again_before_the_hit, "2 has sequence 1, asked after 1 had 1"),
        (corrupt_by_itself, "1 was told to be corrupt or gone, and nobody"),
        (of_nobody, "shows 9, which nobody asked to save"),
        (other_contents, "step-000000002 holds [1, 2], asked was 2"),
        (other_step, "step-000000001 holds step 3, asked was 1"),
        (not_whole, "isn't whole, and nobody damaged it"),
        (offered_though_damaged, "latest answers 2, which had been damaged or deleted"),
        (mixed, "brought back a mixture"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_violation_is_told(story: Any, fault: str) -> None:
    log = Log()
    story(log)
    assert any(fault in said for said in check(log.events)), check(log.events)


@pytest.mark.parametrize("excuse", ["retention", "rewind", "damage", "trouble", "a hit newest"])
def test_what_may_be_gone_is_not_missed(excuse: str) -> None:
    log = Log(keep_last=1)
    log.saved(1, None)
    match excuse:
        case "retention":
            log.saved(2, 1)
        case "rewind":
            log.saved(2, None)
        case "damage":
            log.saved(2, 1)
            log.add("hit", identity=1, what="delete", done=True)
        case "trouble":
            log.add("trouble")
            log.snapshot(3, 1)
            log.saved(2, 1)
        case "a hit newest":  # its sequence is forgotten, and who saved it is told that it is gone
            log.saved(3, 1, 2)
            log.add("hit", identity=3, what="delete", done=True)
            log.told(3, "corrupt", 2)
            log.saved(2, 1)
    log.final(2)
    assert check(log.events) == []


@pytest.mark.parametrize("killed", ["trainer", "daemon"])
def test_what_gave_way_to_a_newer_one_that_nobody_could_tell_is_not_missed(killed: str) -> None:
    log = Log()
    log.saved(1, None)
    log.snapshot(2, 1)
    if killed == "trainer":
        log.killed_in(3, 2, gives_way=True)
        log.final(1)
    else:
        log.snapshot(3, 2, gives_way=True)
        log.told(2, "unknown")
        log.told(3, "committed", 3)
        log.final(1, 3)
    assert check(log.events) == []


def test_what_is_wrong_is_told_with_the_events_and_daemons_of_its_run_alone(tmp_path: Path) -> None:
    log = Log()
    falling(log)
    log.add("listing", checkpoints=[{"sequence": 4, "name": "step-000000002", "identity": 2}])
    events = [*log.events, *({**event, "run": "other"} for event in log.events[:3])]
    (tmp_path / ".ckptd").mkdir()
    said = ["INFO daemon.started pid=1", "INFO run.opened run=r", "INFO run.opened run=other"]
    (tmp_path / ".ckptd" / "daemon.log").write_text("\n".join(said))
    faults = ["run r: 2 has sequence 4, asked after 1 had 5", "Traceback: a trainer that ended by itself"]
    lines = in_words(events, faults, tmp_path).splitlines()
    assert lines[:2] == [f"- {fault}" for fault in faults]
    assert lines[3].endswith("seconds since its first event:")
    assert "snapshot identity=1" in lines[5]
    assert lines[-5].endswith("listing  4:step-000000002=2")
    assert lines[-2:] == said[:2]
