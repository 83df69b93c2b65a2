from __future__ import annotations

from ckptd_daemon.verify.backlog import Backlog, Job


def names_taken(backlog: Backlog, now: float) -> list[str]:
    taken = []
    while job := backlog.take(now):
        taken.append(job.name)
    return taken


def test_asked_for_goes_first_and_then_the_higher_step() -> None:
    backlog = Backlog(settle_s=1.0)
    for name in ("step-000000100", "step-000001000", "step-000000200", "step-000000200.2"):
        backlog.saw("r", name, "s", now=0.0)
    backlog.ask("r", "step-000000100")
    assert names_taken(backlog, now=1.0) == [
        "step-000000100", "step-000001000", "step-000000200.2", "step-000000200",
    ]  # fmt: skip


def test_a_folder_that_keeps_changing_is_not_judged_until_it_rests() -> None:
    backlog = Backlog(settle_s=1.0)
    backlog.saw("r", "step-000000001", "one file", now=0.0)
    backlog.saw("r", "step-000000001", "two files", now=0.5)
    assert backlog.take(1.0) is None
    assert backlog.due_in(1.0) == 0.5
    job = backlog.take(1.5)
    assert job is not None
    assert not backlog.needs_check(job, "three files", now=1.5)
    assert backlog.take(2.25) is None
    job = backlog.take(2.5)
    assert job is not None
    assert backlog.needs_check(job, "three files", now=2.9)


def test_what_the_daemon_asks_for_does_not_wait_to_settle() -> None:
    backlog = Backlog(settle_s=60.0)
    backlog.saw("r", "step-000000001", "old", now=0.0)
    backlog.ask("r", "step-000000001")
    assert backlog.due_in(0.0) == 0.0
    job = backlog.take(0.0)
    assert job is not None
    assert job.asked
    assert backlog.needs_check(job, "new", now=0.0)
    assert backlog.take(100.0) is None  # and it isn't checked a second time because it was also seen


def test_a_failure_is_reported_only_when_the_second_check_of_the_same_bytes_fails_too() -> None:
    backlog = Backlog(settle_s=1.0)
    job = Job("r", "step-000000001", asked=True)
    assert not backlog.may_report(job, 0.0, ok=False, gone=False, before="s", after="s")
    assert backlog.take(0.5) is None
    second = backlog.take(1.0)
    assert second == Job("r", "step-000000001", asked=True, failed=True, signature="s", since=0.0)
    assert backlog.may_report(second, 1.0, ok=False, gone=False, before="s", after="s")
    assert backlog.take(99.0) is None


def test_a_failure_of_bytes_that_changed_since_counts_as_the_first_one_again() -> None:
    backlog = Backlog(settle_s=1.0)
    failed_once = Job("r", "step-000000001", failed=True, signature="s")
    assert not backlog.may_report(failed_once, 0.0, ok=False, gone=False, before="s", after="t")
    job = backlog.take(1.0)
    assert job is not None
    assert not job.failed


def test_a_folder_that_changed_while_it_was_read_is_read_again_even_when_it_passed() -> None:
    backlog = Backlog(settle_s=1.0)
    assert not backlog.may_report(Job("r", "step-000000001"), 0.0, ok=True, gone=False, before="s", after="t")
    assert backlog.take(1.0) is not None


def test_one_that_could_not_be_read_is_tried_again_and_still_answered() -> None:
    backlog = Backlog(settle_s=1.0)
    backlog.put_off(Job("r", "step-000000001", asked=True), "s", until=10.0)
    backlog.saw("r", "step-000000001", "s", now=5.0)
    assert backlog.take(9.0) is None
    job = backlog.take(10.0)
    assert job is not None
    assert job.asked


def test_reported_bytes_are_not_checked_again_until_they_change() -> None:
    backlog = Backlog(settle_s=0.0)
    assert backlog.may_report(Job("r", "step-000000001"), 0.0, ok=True, gone=False, before="s", after="s")
    backlog.known_good("r", "step-000000002", "s")
    for name in ("step-000000001", "step-000000002"):
        backlog.saw("r", name, "s", now=1.0)
    assert backlog.due_in(1.0) is None
    backlog.saw("r", "step-000000002", "changed", now=2.0)
    assert names_taken(backlog, 2.0) == ["step-000000002"]


def test_what_vanished_is_forgotten_and_only_an_asked_one_is_answered() -> None:
    backlog = Backlog(settle_s=0.0)
    for name in ("step-000000001", "step-000000002"):
        backlog.saw("r", name, "s", now=0.0)
    backlog.saw("other", "step-000000001", "s", now=0.0)
    backlog.listed("r", {"step-000000002"})
    assert [(j.run, j.name) for j in iter(lambda: backlog.take(0.0), None)] == [
        ("r", "step-000000002"),
        ("other", "step-000000001"),
    ]
    assert backlog.may_report(Job("r", "a", asked=True), 0.0, ok=False, gone=True, before="", after="")
    assert not backlog.may_report(Job("r", "a"), 0.0, ok=False, gone=True, before="", after="")


def test_one_that_comes_back_under_its_old_name_is_checked_again() -> None:
    backlog = Backlog(settle_s=0.0)
    backlog.known_good("r", "step-000000001", "s")
    backlog.listed("r", set())
    backlog.saw("r", "step-000000001", "s", now=0.0)
    assert names_taken(backlog, 0.0) == ["step-000000001"]


def test_a_pending_second_look_is_not_lost_to_a_listing_of_bytes_that_were_reported_before() -> None:
    backlog = Backlog(settle_s=1.0)
    for name, asked in (("step-000000001", False), ("step-000000002", True)):
        backlog.known_good("r", name, "s")
        job = Job("r", name, asked=asked)
        assert not backlog.may_report(job, 0.0, ok=False, gone=False, before="s", after="s")
        backlog.saw("r", name, "s", now=0.5)
    backlog.known_good("r", "step-000000003", "s")
    backlog.put_off(Job("r", "step-000000003", asked=True), "s", until=1.0)
    backlog.saw("r", "step-000000003", "s", now=0.5)
    assert names_taken(backlog, 1.0) == ["step-000000003", "step-000000002", "step-000000001"]
