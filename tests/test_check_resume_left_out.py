"""check_resume on jobs that leave one thing out of their state, of each kind: it is named, with what to do."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptd
import jobs_left_out as jobs
from check_here import check_here
from ckptd.proof import own_process
from ckptd.proof.sources import sources_in
from ckptd.proof.trace import collect
from test_check_resume_faults import OTHER_DATA, as_it_was, first

__all__ = ["as_it_was"]

#: job → the suspect, the value it has after the restore, and at the snapshot ("": one that no reader knows).
SUSPECTS: dict[Callable[[], Any], tuple[str, str, str]] = {
    jobs.wrapped_loader: ("loader.batch_in_epoch in losses()", "0", "4"),
    jobs.scaler: ("grown.scale in losses()", "5.316911983139664e+36", "6.64613997892458e+35"),
    jobs.torch_generator: ("noise in <lambda>()", "", ""),
    jobs.numpy_generator: ("noise in <lambda>()", "", ""),
    jobs.numpy_random_state: ("noise in <lambda>()", "", ""),
    jobs.object_with_slots: ("counter.count in <lambda>()", "0", "4"),
    jobs.counting_iterator: ("steps in <lambda>()", "'count(0)'", "'count(4)'"),
    jobs.partial: ("more.args[0][0] in losses()", "0.0", "4.0"),
}


@pytest.mark.parametrize("job", SUSPECTS, ids=lambda job: job.__name__)
def test_what_is_left_out_is_named_with_both_its_values(job: Callable[[], Any], tmp_path: Path) -> None:
    found = first(job, tmp_path, cut=4)
    assert (found.phase, found.cut) == ("resumed", 4)
    (one,) = found.suspects
    name, after, before = SUSPECTS[job]
    assert (one.example, not after or one.seen, not before or one.wanted) == (
        name, after or True, before or True
    )  # fmt: skip
    assert one.seen != one.wanted
    assert found.look_for[0].startswith("the suspects: put them into the state")


def test_what_the_loop_makes_anew_is_named_beside_a_suspect_too(tmp_path: Path) -> None:
    report = check_here(jobs.counts_in_the_loop, tmp_path, cuts=[4])
    found = report.first
    assert found is not None and [one.name for one in found.suspects] == ["SEEN in module jobs_left_out"]
    assert "\n  made anew     steps in losses(), " in str(report)
    assert found.look_for[0].startswith("the suspects") and "makes anew" in found.look_for[1]


def test_an_object_that_only_later_steps_need_is_named_with_the_verdict(tmp_path: Path) -> None:
    report = check_here(jobs.averages_for_later, tmp_path, cuts=[4])
    assert report.exact and report.left_out == ("trainer.ema in losses()",)
    assert "\n  BUT LEFT OUT  trainer.ema in losses(): not as in the uninterrupted run" in str(report)
    ema, seen = report.notes
    assert ema.startswith(
        "the state doesn't bring back trainer.ema in losses(): 5 values differ after the resume"
    )
    assert "if you use it later (an EMA, a best model, a scaler), put it into the state" in ema
    assert seen.startswith("the state doesn't bring back SEEN in module jobs_left_out: one value differs")


@pytest.mark.parametrize("job", [jobs.stream_with_a_state, jobs.stream_that_is_fetched_again])
def test_what_a_loader_brings_back_when_it_goes_on_is_not_said_to_be_left_out(
    job: Callable[[], Any], tmp_path: Path
) -> None:
    report = check_here(job, tmp_path, cuts=[4])
    assert report.exact and report.notes == ()


@OTHER_DATA
def test_what_such_a_datasets_methods_reach_is_a_suspect_all_the_same(tmp_path: Path) -> None:
    found = first(jobs.stream_with_a_state_that_counts_in_a_global, tmp_path, cut=4)
    assert [one.name for one in found.suspects] == ["SEEN in module jobs_left_out"]


def test_a_loader_that_is_wrapped_and_left_out_is_told_to_be_put_in(tmp_path: Path) -> None:
    found = first(jobs.wrapped_loader, tmp_path, cut=4)
    assert found.look_for[1].startswith("loader in losses(): a ResumableLoader that isn't in the state")
    assert "put it in, state['loader']" in found.look_for[1]
    assert not any("wrap it" in look for look in found.look_for)


def test_a_loader_that_is_in_a_container_of_the_state_is_in_the_state(tmp_path: Path) -> None:
    report = check_here(jobs.loader_in_a_container, tmp_path, steps=10)
    assert report.exact and report.notes == ()
    assert report.cuts == (4,)  # 5 ends an epoch


@pytest.mark.filterwarnings("ignore:.*gradients accumulated:ckptd.CheckpointWarning")
def test_gradients_that_are_left_out_come_first_among_what_to_look_for(tmp_path: Path) -> None:
    found = first(jobs.accumulates_by_its_own_count, tmp_path, cut=3)
    assert (found.phase, found.kind) == ("resumed", "module")
    assert found.look_for[0].startswith("gradients accumulated over several steps: put them in")
    assert found.look_for[1].startswith("variables that the loop makes anew")
    assert not any("learning rate" in look for look in found.look_for)  # the scheduler is in the state


def test_a_draw_from_the_operating_system_is_named_with_its_function(tmp_path: Path) -> None:
    found = first(jobs.draws_from_the_system, tmp_path)
    assert (found.phase, found.step, found.kind) == ("repeat", 1, "loss")
    assert found.look_for[0].startswith(
        "random.SystemRandom in SystemNoise.__init__(): takes numbers that no"
    )
    assert not any(look.startswith("seeds:") for look in found.look_for)  # the global ones are equal


def test_a_seed_that_comes_from_the_operating_system_is_named_with_its_function(tmp_path: Path) -> None:
    found = first(jobs.seeds_from_the_system, tmp_path)
    assert (found.phase, found.step, found.suspects) == ("repeat", 0, ())
    assert found.look_for[0].startswith("os.urandom in seeds_from_the_system()")


def test_a_generator_without_a_seed_is_a_suspect_of_a_job_that_isnt_deterministic(tmp_path: Path) -> None:
    report = check_here(jobs.generator_without_a_seed, tmp_path)
    found = report.first
    assert found is not None and found.phase == "repeat"
    (one,) = found.suspects
    assert one.name == "noise in <lambda>()" and found.made_anew == ()
    assert found.look_for[0].startswith("the suspects, which differ as soon as make_job() is done")
    assert "when made" in str(report) and "after the restore" not in str(report)


def test_a_source_of_numbers_is_found_however_it_was_imported() -> None:
    import time
    from os import urandom

    names = {"TIME": time, "URANDOM": urandom}
    code = compile("TIME.time()\nlambda: URANDOM(4)\nTIME.sleep\nother.urandom", "a file", "exec")
    assert list(sources_in(code, names)) == ["time.time in <module>()", "os.urandom in <lambda>()"]


def test_a_source_is_what_the_code_takes_from_the_module_itself() -> None:
    import time

    code = compile("CLOCK.perf_counter()\njob.time = CLOCK.monotonic_ns\nCLOCK.sleep.time", "a file", "exec")
    found = list(sources_in(code, {"CLOCK": time}))
    assert found == ["time.perf_counter in <module>()", "time.monotonic_ns in <module>()"]


def test_a_source_in_code_of_many_names_is_found() -> None:
    import time

    many = "\n".join(f"other.name_{number}" for number in range(300))  # then a name's number takes two bytes
    code = compile(f"{many}\nCLOCK.process_time()", "a file", "exec")
    assert list(sources_in(code, {"CLOCK": time})) == ["time.process_time in <module>()"]


def test_what_ckptd_warns_of_in_a_run_is_in_its_trace_and_goes_on_to_be_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_where, **_how: shown.append(str(message)))
    own_process.tell_warnings(lines.append)
    with warnings.catch_warnings():  # keeps showwarning, takes the filters back
        warnings.simplefilter("always")
        warnings.warn("of ours", ckptd.CheckpointWarning, stacklevel=1)
        warnings.warn("of others", stacklevel=1)
    assert shown == ["of ours", "of others"]
    assert collect(map(json.loads, lines)).warned == ["of ours"]
