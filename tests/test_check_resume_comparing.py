"""The pure part of check_resume: what differs first, how far, where to cut, how it reads."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import InvalidArgument
from ckptd.proof import trace
from ckptd.proof.causes import explain, of_refusal, of_unseeded
from ckptd.proof.comparing import Extent, Finding, Suspect, first_difference, made_anew, suspects_of
from ckptd.proof.cuts import chosen_cuts, middle_cut
from ckptd.proof.details import notes_on
from ckptd.proof.elements import apart
from ckptd.proof.report import Difference, ResumeReport
from ckptd.proof.trace import Leaf, Moment, Trace
from ckptd.snapshot import keypath

KINDS = {
    "model": "module",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "train": "data",
    "noise": "generator",
    "rng": "rng",
}


def key(*path: Any) -> str:
    return json.dumps(keypath.to_json(path))


def leaves(**changed: str) -> dict[str, Leaf]:
    """Two values of each component; `model="x"` gives the model's second value another text."""
    found = {key("rng", "torch"): Leaf("r"), key("rng", "python"): Leaf(changed.get("rng", "0"))}
    for name in reversed(KINDS):
        if name != "rng":
            found[key(name, "a")] = Leaf("same")
            found[key(name, "b")] = Leaf(changed.get(name, "0"))
    return found


def run(steps: int, losses: dict[int, str] | None = None, **at: Any) -> Trace:
    """A trace of `steps` steps; `step_3=leaves(…)` gives one of them other values."""
    moments = {}
    for step in range(steps + 1):
        loss = {"loss": (losses or {}).get(step, f"{step}.5")} if step else {}
        moments[step] = Moment(step, loss, at.get(f"step_{step}", leaves()))
    return Trace(kinds=dict(KINDS), moments=moments, done=True)


def test_equal_runs_have_no_first_difference() -> None:
    assert first_difference(run(5), run(5)) is None
    assert first_difference(run(5), run(3)) is None  # one that was only asked for less


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        (("rng", "noise", "train", "scheduler", "optimizer", "model"), "module"),
        (("rng", "noise", "train", "scheduler", "optimizer"), "optimizer"),
        (("rng", "noise", "train", "scheduler"), "scheduler"),
        (("rng", "noise", "train"), "data"),
        (("rng", "noise"), "generator"),
        (("rng",), "rng"),
    ],
)
def test_within_a_step_the_model_is_named_before_what_follows_from_it(
    changed: tuple[str, ...], kind: str
) -> None:
    other = run(5, step_3=leaves(**dict.fromkeys(changed, "1")), step_4=leaves(model="2"))
    found = first_difference(run(5), other)
    assert found is not None
    assert (found.step, found.kind, found.seen, found.wanted) == (3, kind, "1", "0")
    assert {one.component for one in found.extents if one.differing} == set(changed)
    assert all(one.total == 2 for one in found.extents)


def test_the_loss_of_a_step_is_named_first_and_its_extents_tell_the_rest() -> None:
    found = first_difference(run(5), run(5, {4: "9.5"}, step_4=leaves(rng="1")))
    assert found is not None
    assert (found.step, found.kind, found.where, found.seen, found.wanted) == (
        4,
        "loss",
        "loss",
        "9.5",
        "4.5",
    )
    assert found.rng_differs


def test_a_state_right_after_the_restore_is_compared_without_its_loss() -> None:
    resumed = run(5)
    resumed.moments[2] = replace(resumed.moments[2], losses={})
    assert first_difference(run(5), resumed) is None
    resumed.moments[2] = replace(resumed.moments[2], leaves=leaves(model="1"))
    found = first_difference(run(5), resumed, steps=(2,))
    assert found is not None and found.where == "state['model']['b']"


def test_a_value_that_only_one_side_has_is_absent_on_the_other() -> None:
    more = leaves() | {key("model", "new"): Leaf("float32[2]", "abc")}
    found = first_difference(run(2), run(2, step_1=more))
    assert found is not None and (found.seen, found.wanted) == ("float32[2] (abc…)", "absent")
    found = first_difference(run(2, step_1=more), run(2))
    assert found is not None and (found.seen, found.wanted) == ("absent", "float32[2] (abc…)")


def test_a_loss_of_a_dict_is_named_and_one_that_is_missing_too() -> None:
    one, other = run(1), run(1)
    one.moments[1] = replace(one.moments[1], losses={"a": "1.0", "b": "nan"})
    other.moments[1] = replace(other.moments[1], losses={"a": "1.0"})
    found = first_difference(one, other)
    assert found is not None and (found.where, found.seen, found.wanted) == ("loss 'b'", "absent", "nan")
    assert first_difference(one, one) is None  # nan is nan


def test_a_run_that_has_no_more_steps_differs_after_its_last_and_only_then() -> None:
    short = run(3)
    short.ended = 3
    found = first_difference(run(5), short)
    assert found is not None and (found.step, found.kind) == (4, "end")
    changed = run(3, step_2=leaves(model="1"))
    changed.ended = 3
    found = first_difference(run(5), changed)
    assert found is not None and (found.step, found.kind) == (2, "module")


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([*KINDS, "loss"]), st.sampled_from("123")), max_size=6
    ),
)
def test_the_first_difference_is_the_first_step_that_was_changed(
    steps: int, changes: list[tuple[int, str, str]]
) -> None:
    at: dict[str, Any] = {}
    losses: dict[int, str] = {}
    changed: dict[int, set[str]] = {}
    for step, name, text in changes:
        if step > steps or (name == "loss" and step == 0):
            continue
        changed.setdefault(step, set()).add(name)
        if name == "loss":
            losses[step] = f"{text}e9"
        else:
            at[f"step_{step}"] = at.get(f"step_{step}", leaves()) | {
                key(name, "b" if name != "rng" else "python"): Leaf(text)
            }
    found = first_difference(run(steps), run(steps, losses, **at))
    if not changed:
        assert found is None
        return
    assert found is not None and found.step == min(changed)
    names = changed[found.step]
    assert (found.kind == "loss") == ("loss" in names)
    assert {one.component for one in found.extents if one.differing} == names - {"loss"}
    back = first_difference(run(steps, losses, **at), run(steps))
    assert back is not None
    assert (back.step, back.where, back.seen, back.wanted) == (
        found.step,
        found.where,
        found.wanted,
        found.seen,
    )


# --- what lies beside the state -------------------------------------------------------------------


def test_suspects_are_what_both_runs_reach_one_for_each_variable() -> None:
    counter, ema = trace.scoped("counter", "losses()"), trace.scoped("ema", "losses()")
    local = trace.scoped("batch", "losses()")
    before = {
        f"{counter}.steps": Leaf("4"), f"{ema}.decay": Leaf("0.9"), f"{ema}.n": Leaf("4"),
        f"{ema}.shadow": Leaf("float32[2]", "a"), "state['model'].seen": Leaf("2"), local: Leaf("1"),
    }  # fmt: skip
    after = {
        f"{counter}.steps": Leaf("0"), f"{ema}.decay": Leaf("0.9"), f"{ema}.n": Leaf("0"),
        "state['model'].seen": Leaf("2"),
    }  # fmt: skip
    one, two = suspects_of(before, after)
    assert one == Suspect(
        name="counter in losses()", example="counter.steps in losses()", seen="0", wanted="4", values=1
    )
    assert (two.name, two.example, two.values) == ("ema in losses()", "ema.n in losses()", 2)
    assert made_anew(before, after) == ("batch in losses()",)
    (whole,) = [one for one in suspects_of(before, after, [ema]) if one.has_state]
    assert whole == replace(two, has_state=True)
    assert suspects_of(before, before) == () and made_anew(before, before) == ()


# --- how far apart --------------------------------------------------------------------------------


def test_elements_are_counted_and_their_largest_distance_said() -> None:
    one, other = struct.pack("=3f", 1.0, 2.0, 3.0), struct.pack("=3f", 1.0, 2.5, 2.0)
    assert apart("float32", 4, one, other) == "2 of 3 elements differ, by at most 1.0"
    assert apart("float32", 4, one, one) == "0 of 3 elements differ, by at most 0.0"
    assert apart("int64", 8, struct.pack("=q", -5), struct.pack("=q", 2**40)).endswith(f"{2.0**40 + 5!r}")
    assert apart("bool", 1, b"\0\1", b"\1\1") == "1 of 2 elements differ"
    assert apart("float8_e4m3fn", 1, b"\0\1", b"\1\2") == "2 of 2 elements differ"
    assert apart("bfloat16", 2, b"\x80\x3f", b"\x00\x40") == "1 of 1 elements differ, by at most 1.0"


def test_a_distance_that_is_none_is_said_and_other_sizes_are_not_compared() -> None:
    one, other = struct.pack("=2d", math.nan, 1.0), struct.pack("=2d", 0.0, 9.0)
    assert apart("float64", 8, one, other) == "2 of 2 elements differ, one is not finite"
    assert apart("float64", 8, one, other[:8]) == ""
    assert apart("float64", 0, b"", b"") == ""


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=30))
def test_as_many_elements_differ_as_have_other_bits(pairs: list[tuple[float, float]]) -> None:
    one = b"".join(struct.pack("=f", a) for a, _ in pairs)
    other = b"".join(struct.pack("=f", b) for _, b in pairs)
    count = sum(one[i : i + 4] != other[i : i + 4] for i in range(0, len(one), 4))
    assert apart("float32", 4, one, other).startswith(f"{count} of {len(pairs)} elements differ")


# --- cuts -----------------------------------------------------------------------------------------


def test_cuts_are_sorted_and_each_once() -> None:
    assert chosen_cuts([4, 2, 2], 5) == (2, 4)
    assert chosen_cuts(3, 5) == (3,)
    assert chosen_cuts("all", 4) == (1, 2, 3)
    assert chosen_cuts(None, 4) is None


@pytest.mark.parametrize("cuts", [0, 5, -1, True, [], [1.0], ["1"], "some", "", [5]])
def test_cuts_outside_the_run_are_refused(cuts: Any) -> None:
    with pytest.raises(InvalidArgument, match="not steps to be killed after"):
        chosen_cuts(cuts, 5)


@given(st.integers(2, 30), st.sets(st.integers(1, 29)))
def test_the_middle_cut_is_the_nearest_step_inside_an_epoch(steps: int, edges: set[int]) -> None:
    base = Trace(moments={step: Moment(step, {}, {}, "", step in edges) for step in range(steps + 1)})
    cut = middle_cut(base, steps)
    assert 1 <= cut < steps
    inside = [step for step in range(1, steps) if step not in edges]
    assert not inside or (
        cut in inside and abs(2 * cut - steps) == min(abs(2 * step - steps) for step in inside)
    )


# --- the trace ------------------------------------------------------------------------------------


def test_a_trace_comes_back_as_it_was_written_and_a_line_cut_short_does_not_count(tmp_path: Path) -> None:
    moment = Moment(3, {"loss": "0.1"}, leaves(model="x\n"), "/values", True)
    beside = {trace.scoped("n", "losses()"): Leaf("1", "ab")}
    path = tmp_path / "trace.jsonl"
    path.write_text(
        trace.line("kinds", kinds=KINDS)
        + trace.moment_line(moment)
        + trace.beside_line(3, beside)
        + trace.line("saved", step=3)
        + trace.line("unseeded", part="numpy", step=2)
        + trace.line("done")[:-3]
    )
    found = trace.read_trace(path)
    assert (found.kinds, found.moments, found.beside) == (KINDS, {3: moment}, {3: beside})
    assert (found.saved, found.unseeded, found.done, found.last_step) == ([3], {"numpy": 2}, False, 3)
    assert trace.read_trace(tmp_path / "none") == Trace()


@given(
    st.recursive(st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(max_size=4)),
                 lambda inner: st.tuples(inner, inner), max_leaves=4)
)  # fmt: skip
def test_keys_that_python_calls_equal_stay_apart(part: Any) -> None:
    assert trace.show_key(key("model", part)).startswith("state['model'][")
    assert len({key("a", 1), key("a", True), key("a", 1.0), key("a", "1")}) == 4


# --- causes and report ----------------------------------------------------------------------------


def finding(kind: str, step: int = 5, rng: int = 0) -> Finding:
    extents = (Extent(component="rng", differing=rng, total=5),)
    return Finding(step=step, kind=kind, where="x", key="", seen="1", wanted="0", extents=extents)


@pytest.mark.parametrize("phase", ["repeat", "restore", "resumed"])
@pytest.mark.parametrize("kind", ["loss", "end", *dict.fromkeys(KINDS.values()), "loader"])
def test_every_kind_in_every_phase_is_explained_with_something_to_look_for(phase: Any, kind: str) -> None:
    for step in (0, 5, 7):
        for kinds in ({}, KINDS, {"loader": "loader"}):
            why, look_for = explain(phase, finding(kind, step), cut=4, kinds=kinds)
            assert why and look_for and all(look_for)
            assert not any("ckptd." in look and not hasattr_named(look) for look in look_for)


def hasattr_named(text: str) -> bool:
    """Whether every name of ours in an advice is a public one."""
    import re

    import ckptd

    return all(name in ckptd.__all__ for name in re.findall(r"ckptd\.([A-Za-z]\w*)", text))


def test_other_random_draws_point_to_the_loader_and_the_same_ones_to_what_is_outside() -> None:
    kinds = {"model": "module", "o": "optimizer"}
    around = {"loaders": ["batches in losses()"], "in_workers": [], "ranges": []}
    _, with_rng = explain("resumed", finding("loss", rng=2), cut=4, kinds=kinds, around=around)
    assert with_rng[0].startswith("batches in losses(): a DataLoader that isn't in the state")
    assert sum("ckptd.ResumableLoader(loader)" in look for look in with_rng) == 1
    _, without = explain("resumed", finding("loss"), cut=4, kinds=kinds)
    assert "if there is one" in without[-1] and not any("DataLoader" in look for look in without[:-1])
    _, wrapped = explain("resumed", finding("loss"), cut=4, kinds=KINDS | {"loader": "loader"})
    assert not any("ResumableLoader" in look for look in wrapped)


def test_the_other_explanations_say_what_to_do() -> None:
    assert "random.seed(0)" in of_unseeded("python", 3)[1][0] and "step 3" in of_unseeded("python", 3)[0]
    assert "make_job()" in of_refusal()[0]


DIFFERENCE = Difference(
    phase="resumed", cut=4, step=5, kind="loss", where="loss", seen="0.5", wanted="0.25",
    extents=(Extent(component="model", differing=2, total=3), Extent(component="rng", differing=0, total=5)),
    suspects=(Suspect(name="ema in losses()", example="ema.n in losses()", seen="0", wanted="4", values=3),),
    made_anew=("batch in losses()",), why="it is so", look_for=("here", "there"),
)  # fmt: skip


def test_a_report_reads_like_this() -> None:
    report = ResumeReport(
        exact=False, job="train.py:make_job", steps=8, cuts=(4,), differences=(DIFFERENCE,), notes=("a note",)
    )
    assert str(report).splitlines() == [
        "NOT EXACT  train.py:make_job: killed after step 4 of 8 and resumed, it differs",
        "  first         killed after step 4, step 5: loss",
        "  resumed       0.5",
        "  wanted        0.25",
        "  at that step  model: 2 of 3 differ, rng: equal",
        "  certain       it is so",
        "  suspects      - ema.n in losses(): 0 after the restore, 4 at the snapshot (and 2 more of ema in losses())",
        "  made anew     batch in losses(): variables of the loop, which starts again",
        "  look for      - here",
        "                - there",
        "  note          a note",
    ]
    assert report.first is DIFFERENCE and not report


def test_a_report_of_many_cuts_is_short_and_its_json_is_strict() -> None:
    report = ResumeReport(
        exact=True, job="m:f", steps=40, cuts=tuple(range(1, 40)), components=("model", "rng"), values=7
    )
    assert str(report).splitlines() == [
        "EXACT  m:f: killed after step 1 … 39 (each) of 40 and resumed, it goes on bit for bit",
        "  equal         every loss, and after each step all 7 values of model, rng",
    ]
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["first"] is None
    found = replace(report, exact=False, differences=(DIFFERENCE,)).as_json()
    assert found["first"]["suspects"][0]["example"] == "ema.n in losses()"


def test_what_makes_a_proof_worth_little_is_noted() -> None:
    still = run(3, dict.fromkeys(range(1, 4), "1.0"))
    assert list(notes_on(still)) == [
        "the losses never change: does the job train?",
        "state['model'] never changed: is it the object that the loop trains?",
    ]
    broken = run(3, {2: "nan"}, step_3=leaves(model="1"))
    assert list(notes_on(broken)) == ["a loss is not finite from step 2 on: what follows proves little"]
    assert list(notes_on(run(3, step_3=leaves(model="1")))) == []
