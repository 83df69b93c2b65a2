"""check_resume on jobs with one planted fault each: it is found, and named so that its owner finds it too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptd
import jobs_exact
import jobs_faulty
from check_here import check_here
from ckptd.errors import InvalidArgument, JobFailed, UnstorableState
from ckptd.proof import child
from ckptd.proof.report import Difference

#: The loader says it too, where the fault is in what it yields.
OTHER_DATA = pytest.mark.filterwarnings("ignore:the data after this resume:ckptd.CheckpointWarning")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The jobs set threads and generators, which belong to the whole process."""
    threads, states = (
        torch.get_num_threads(),
        (random.getstate(), np.random.get_state(), torch.get_rng_state()),
    )
    yield
    torch.set_num_threads(threads)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def first(job: Callable[[], Any], folder: Path, *, cut: int | None = None) -> Difference:
    report = check_here(job, folder, cuts=None if cut is None else [cut])
    assert not report.exact and not report
    assert report.first is not None and report.first.why in " ".join(str(report).split())
    return report.first


@pytest.mark.slow
def test_an_exact_job_is_exact_at_every_cut(tmp_path: Path) -> None:
    report = check_here(jobs_exact.make_job, tmp_path, steps=12, cuts=range(1, 12))
    assert report.exact and report and report.first is None
    assert report.notes == ()
    assert report.components == ("model", "optimizer", "scheduler", "loader", "train", "rng")


def test_the_middle_is_cut_but_not_between_two_epochs(tmp_path: Path) -> None:
    assert check_here(jobs_exact.make_job, tmp_path, steps=10).cuts == (4,)  # 5 ends an epoch


def test_a_job_that_never_seeds_what_it_never_uses_is_exact(tmp_path: Path) -> None:
    # A ResumableLoader records Python's and NumPy's generators too: they must not differ by themselves.
    assert check_here(jobs_faulty.never_seeded_and_never_used, tmp_path).exact


#: job, cut, kind, where, a suspect
BESIDE: list[tuple[Callable[[], Any], int, str, str, str]] = [
    (
        jobs_faulty.optimizer_left_out,
        4,
        "module",
        "state['model']['0.weight']",
        "state['optimizer'].state[0]",
    ),
    (jobs_faulty.scheduler_left_out, 3, "optimizer", "['param_groups'][0]['lr']", "['scheduler'].last_epoch"),
    (jobs_faulty.ema_left_out, 4, "loss", "loss 'to_ema'", "ema.n_averaged in losses()"),
    (jobs_faulty.counter_outside, 4, "loss", "loss", "counter.steps in losses()"),
    (jobs_faulty.counted_by_a_global, 4, "loss", "loss", "COUNTED in module jobs_faulty"),
    (jobs_faulty.own_generator, 4, "loss", "loss", "noise in losses()"),
    (jobs_faulty.numpy_generator, 4, "loss", "loss", "draws.rng in losses()"),
    (jobs_faulty.buffer_not_persistent, 4, "loss", "loss", "state['model'].0.seen"),
    (jobs_faulty.dataset_with_memory, 6, "loss", "loss", "READS.count in module jobs_faulty"),
    (jobs_faulty.an_iterator_of_its_own, 4, "loss", "loss", "losses.offset"),
    (jobs_faulty.history_outside, 4, "loss", "loss", "history[0] in losses()"),
]


@OTHER_DATA
@pytest.mark.parametrize(
    ("job", "cut", "kind", "where", "suspect"), BESIDE, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_is_not_in_the_state_is_a_suspect_by_name(
    tmp_path: Path, job: Callable[[], Any], cut: int, kind: str, where: str, suspect: str
) -> None:
    found = first(job, tmp_path, cut=cut)
    assert (found.phase, found.cut, found.step, found.kind) == ("resumed", cut, cut + 1, kind)
    assert where in found.where
    assert [one for one in found.suspects if suspect in one.example], found.suspects
    assert len(found.suspects) <= 2
    assert f"step {cut + 1} uses something beside the state" in found.why
    assert found.look_for[0].startswith("the suspects: put them into the state")


def test_a_forgotten_scheduler_that_makes_no_difference_yet_is_said(tmp_path: Path) -> None:
    report = check_here(
        jobs_faulty.scheduler_left_out, tmp_path, cuts=[4]
    )  # StepLR multiplies at even steps only
    assert report.exact
    (note,) = report.notes
    assert "No loss and no value of the state depended on it in these steps" in note
    assert "(state['scheduler'].last_epoch in train(): 0 after the restore, 4 at the snapshot)" in note
    assert report.left_out == ("state['scheduler'] in train()",)


def test_a_loader_that_is_not_wrapped_is_what_to_look_for(tmp_path: Path) -> None:
    found = first(jobs_faulty.plain_loader, tmp_path)
    assert (found.phase, found.step, found.kind) == ("resumed", 5, "loss")
    assert found.look_for[0].startswith("loader in losses(): a DataLoader that isn't in the state: wrap it")
    assert "ckptd.ResumableLoader(loader)" in found.look_for[0]
    assert {one.component for one in found.extents if one.differing} == {"model", "optimizer", "rng"}


def test_steps_counted_anew_are_named_as_variables_of_the_loop(tmp_path: Path) -> None:
    found = first(jobs_faulty.steps_counted_anew, tmp_path)
    assert (found.where, found.seen, found.wanted) == ("loss 'step'", "1", "5")
    assert "step in losses()" in found.made_anew and not found.suspects
    assert "makes anew" in found.look_for[0]


def test_a_forgotten_scaler_that_makes_no_difference_yet_is_said(tmp_path: Path) -> None:
    report = check_here(jobs_faulty.scaler_left_out, tmp_path, cuts=[4])
    assert report.exact
    (note,) = report.notes
    assert "(scaler.scale in losses(): 1024.0 after the restore, 4096.0 at the snapshot)" in note
    assert report.left_out == ("scaler in losses()",)


def test_a_job_without_a_loader_is_not_sent_to_look_for_one_first(tmp_path: Path) -> None:
    found = first(jobs_faulty.history_in_the_loop, tmp_path)
    assert "history in losses()" in found.made_anew
    assert "makes anew" in found.look_for[0]
    assert [number for number, look in enumerate(found.look_for) if "DataLoader" in look] == [
        len(found.look_for) - 1
    ]


@pytest.mark.parametrize(
    "job", [jobs_faulty.counts_by_a_range_made_too_early, jobs_faulty.weighs_by_such_a_range]
)
def test_a_range_that_is_made_before_the_restore_is_named(tmp_path: Path, job: Callable[[], Any]) -> None:
    found = first(job, tmp_path)
    assert (found.phase, found.step) == ("resumed", 5)
    assert found.look_for[0].startswith("steps in losses(): made in make_job(), before the restore")


@OTHER_DATA
@pytest.mark.slow
def test_a_generator_of_a_module_that_workers_draw_from_is_named_with_what_can_help(tmp_path: Path) -> None:
    found = first(jobs_faulty.workers_draw_from_a_module, tmp_path, cut=2)
    assert found.look_for[0].startswith("DRAWS in module jobs_faulty: a module's generator, of which each")
    assert "an attribute of the dataset" in found.look_for[0]


@OTHER_DATA
def test_the_same_generator_without_workers_is_a_suspect(tmp_path: Path) -> None:
    found = first(jobs_faulty.draws_from_a_module, tmp_path, cut=2)
    assert [one.name for one in found.suspects] == ["DRAWS in module jobs_faulty"]
    assert not any("workers" in look for look in found.look_for)


def test_a_loader_in_the_state_that_is_not_wrapped_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_here(jobs_faulty.plain_loader_in_the_state, tmp_path)
    assert caught.value.where == "state['loader']"
    assert caught.value.todo == "wrap it: ckptd.ResumableLoader(loader), and train with that one"


def test_a_job_that_ignores_the_restore_is_told_so(tmp_path: Path) -> None:
    report = check_here(jobs_faulty.ignores_the_restore, tmp_path)
    found = report.first
    assert found is not None and (found.phase, found.kind) == ("resumed", "loss")
    assert found.why.endswith("its first loss is the one of step 1")
    assert "trains other objects than those in the state" in found.look_for[0]
    assert report.notes == ("state['model'] never changed: is it the object that the loop trains?",)


def test_a_loop_that_ends_by_a_count_of_its_own_when_resumed(tmp_path: Path) -> None:
    found = first(jobs_faulty.ends_when_resumed, tmp_path)
    assert (found.kind, found.step, found.seen) == ("end", 5, "the job has no more steps")
    assert "ckptd.TrainState()" in found.look_for[0]


def test_an_object_that_loads_something_else_differs_right_after_the_restore(tmp_path: Path) -> None:
    found = first(jobs_faulty.loads_something_else, tmp_path)
    assert (found.phase, found.step, found.where) == ("restore", 4, "state['halves']['value']")
    assert (found.seen, found.wanted) == ("4", "8")
    assert "load_state_dict() doesn't take back what state_dict() gave" in found.why


def test_a_name_that_the_loop_adds_makes_restore_refuse_and_is_named(tmp_path: Path) -> None:
    found = first(jobs_faulty.grows_a_name, tmp_path)
    assert (found.phase, found.kind) == ("restore", "refused")
    assert "state['late'] is in the checkpoint, not in the live state" in found.seen


def test_a_difference_that_comes_late_is_said_to_come_now_and_then(tmp_path: Path) -> None:
    found = first(jobs_faulty.differs_at_the_next_epoch, tmp_path, cut=2)
    assert (found.phase, found.step) == ("resumed", 6)
    assert (
        "steps 3 to 5 were equal, so step 6 uses something beside the state that comes only now" in found.why
    )


def test_a_draw_from_a_generator_that_was_never_seeded_is_named_with_its_step(tmp_path: Path) -> None:
    for job, part, step in (
        (jobs_faulty.unseeded, "python", 1),
        (jobs_faulty.draws_from_numpy_late, "numpy", 3),
    ):
        found = first(job, tmp_path)
        assert (found.phase, found.step, found.where) == ("repeat", step, f"state['rng'][{part!r}]")
        assert "never seeds" in found.why and "seed(0) in make_job()" in found.look_for[0]


def test_a_job_that_differs_before_its_first_step_is_not_deterministic(tmp_path: Path) -> None:
    started: list[str] = []
    report = check_here(jobs_faulty.made_without_a_seed, tmp_path, started=started)
    assert started == ["uninterrupted", "killed"]  # nothing is resumed that two runs don't agree on
    found = report.first
    assert found is not None and (found.phase, found.step, found.cut) == ("repeat", 0, None)
    assert found.where == "state['model']['weight']" and found.apart.startswith(
        "4 of 4 elements differ, by at"
    )
    assert str(report).startswith("NOT DETERMINISTIC") and "before the first step" in str(report)


def test_a_job_that_is_not_deterministic_after_the_cut_is_not_blamed_on_the_resume(tmp_path: Path) -> None:
    found = first(jobs_faulty.differs_from_step_6, tmp_path, cut=3)
    assert (found.phase, found.step, found.kind) == ("repeat", 6, "loss")


def test_every_cut_that_differs_is_in_the_report(tmp_path: Path) -> None:
    report = check_here(jobs_faulty.scheduler_left_out, tmp_path, cuts=[2, 3, 4, 5])
    assert [(one.cut, one.step) for one in report.differences] == [(3, 4), (5, 6)]


def test_tensors_are_compared_by_element(tmp_path: Path) -> None:
    found = first(jobs_faulty.optimizer_left_out, tmp_path)
    assert " of 32 elements differ, by at most 0.00" in found.apart


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (jobs_faulty.gives_a_function, "losses is not an iterator: function"),
        (jobs_faulty.yields_no_number, "the job yielded something that is no loss: str"),
    ],
)
def test_a_job_that_gives_something_else_is_refused_with_what_is_wanted(
    tmp_path: Path, job: Callable[[], Any], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        check_here(job, tmp_path)


def test_a_job_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="the job ended early: after step 3, wanted 8 steps"):
        check_here(jobs_faulty.ends_after_3, tmp_path)


def test_a_state_that_cant_be_stored_is_said_by_key_path(tmp_path: Path) -> None:
    with pytest.raises(UnstorableState, match=r"state\['function'\]"):
        check_here(jobs_faulty.cant_be_stored, tmp_path)


def test_before_the_restore_every_global_generator_is_set_to_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Looks(child.Client):
        def restore(self, state: Any, **how: Any) -> Any:
            seen.append(ckptd.capture_rng_state())
            return super().restore(state, **how)

    monkeypatch.setattr(child, "Client", Looks)
    assert check_here(jobs_exact.make_job, tmp_path, cuts=[2]).exact
    jobs_exact.make_job()
    made = ckptd.capture_rng_state()
    (found,) = seen
    assert found["python"] != made["python"] and found["numpy"] != made["numpy"]
    assert not torch.equal(found["torch"], made["torch"])
