"""What a check found, and how it reads at three in the morning. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from ckptd.proof.causes import Phase
from ckptd.proof.comparing import Extent, Suspect

_WIDTH: Final = 110
_LABEL: Final = 14
_SUSPECTS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing that differs.

    Attributes:
        phase: `repeat`: two uninterrupted runs differ, the job itself isn't deterministic. `restore`: the state
            right after the restore isn't the one of the snapshot. `resumed`: a step after it differs.
        cut: The step after which the run was killed; None for a repeat.
        step: The first step after which they differ; 0 is before the first.
        kind: loss, end, module, optimizer, scheduler, loader, gradients, data, generator, rng, or refused.
        where: `loss`, `losses`, or a key path such as `state['model']['0.weight']`.
        seen, wanted: Its value in this run, and in the uninterrupted one (or in the snapshot). Both "" for a draw
            from a generator that was never seeded.
        apart: For tensors: how many elements differ and by how much; "" when the bytes weren't kept.
        extents: How much of each component differs at that step.
        suspects: What the job reaches beside its state and that didn't come back; for a repeat, what isn't the same
            in two runs when make_job() is done.
        made_anew: Variables of the loop that a resumed run makes anew.
        why: What is certain about it.
        look_for: What usually causes it, the likeliest first.
    """

    phase: Phase
    cut: int | None
    step: int
    kind: str
    where: str
    seen: str
    wanted: str
    apart: str = ""
    extents: tuple[Extent, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    made_anew: tuple[str, ...] = ()
    why: str = ""
    look_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """What check_resume found. `print(report)` says it in words; it is true (`if report:`) when exact.

    Attributes:
        exact: Whether every resumed run was the uninterrupted one, bit for bit.
        job: The job's address.
        steps: Steps of the uninterrupted run.
        cuts: Steps after which a run was killed and resumed.
        differences: The first difference of each cut that has one; or the one that makes the job itself not
            deterministic, alone.
        left_out: Objects with `state_dict` that aren't in the state and had other values after a resume, though nothing
            that was compared depended on them: an EMA, a scaler. A note says more.
        components: Names of the state, "rng" for the global generators.
        values: Values compared after each step.
        state_bytes: Bytes of the state's tensors.
        seconds: How long it took.
        notes: What weakens the proof, such as losses that never change.
    """

    exact: bool
    job: str
    steps: int
    cuts: tuple[int, ...]
    differences: tuple[Difference, ...] = ()
    left_out: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    values: int = 0
    state_bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Difference | None:
        """The first thing that differs; None when it is exact."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        lines = [*_head(self)]
        if self.first is not None:
            lines += _difference(self.first)
        lines += [_labelled("note", note) for note in self.notes]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain values, the fields by their names."""
        first = None if self.first is None else asdict(self.first)
        return asdict(self) | {"first": first}


def _head(report: ResumeReport) -> Iterator[str]:
    after = _steps(report.cuts)
    if report.exact:
        yield f"EXACT  {report.job}: killed after step {after} of {report.steps} and resumed, it goes on bit for bit"
        if report.left_out:
            yield _labelled(
                "BUT LEFT OUT", f"{', '.join(report.left_out)}: not as in the uninterrupted run (see below)"
            )
        yield _labelled(
            "equal",
            f"every loss, and after each step all {report.values} values of {', '.join(report.components)}",
        )
    elif report.first is not None and report.first.phase == "repeat":
        yield f"NOT DETERMINISTIC  {report.job}: two uninterrupted runs of it differ"
    else:
        yield f"NOT EXACT  {report.job}: killed after step {after} of {report.steps} and resumed, it differs"


def _steps(cuts: tuple[int, ...]) -> str:
    if len(cuts) > 8 and cuts == tuple(range(cuts[0], cuts[-1] + 1)):
        return f"{cuts[0]} … {cuts[-1]} (each)"
    return ", ".join(map(str, cuts))


def _difference(found: Difference) -> Iterator[str]:
    here, there = ("one run", "another") if found.phase == "repeat" else ("resumed", "wanted")
    yield _labelled("first", f"{_when(found)}: {found.where}")
    if found.seen or found.wanted:
        yield _labelled(here, found.seen)
        yield _labelled(there, found.wanted)
    if found.apart:
        yield _labelled("apart", found.apart)
    if found.extents:
        yield _labelled("at that step", ", ".join(map(_extent, found.extents)))
    yield _labelled("certain", found.why)
    yield from _suspects(found)
    for number, look in enumerate(found.look_for):
        yield _labelled("" if number else "look for", f"- {look}")


def _when(found: Difference) -> str:
    killed = "" if found.cut is None else f"killed after step {found.cut}, "
    if found.phase == "restore":
        return f"{killed}right after the restore"
    return f"{killed}step {found.step}" if found.step else "before the first step"


def _extent(one: Extent) -> str:
    return f"{one.component}: " + (f"{one.differing} of {one.total} differ" if one.differing else "equal")


def _suspects(found: Difference) -> Iterator[str]:
    here, there = (
        ("when made", "in another run")
        if found.phase == "repeat"
        else ("after the restore", "at the snapshot")
    )
    for number, one in enumerate(found.suspects[:_SUSPECTS]):
        more = f" (and {one.values - 1} more of {one.name})" if one.values > 1 else ""
        text = f"- {one.example}: {one.seen} {here}, {one.wanted} {there}{more}"
        yield _labelled("" if number else "suspects", text)
    if len(found.suspects) > _SUSPECTS:
        yield _labelled("", f"- {len(found.suspects) - _SUSPECTS} more")
    if found.made_anew:
        yield _labelled(
            "made anew", f"{', '.join(found.made_anew[:12])}: variables of the loop, which starts again"
        )


def _labelled(label: str, text: str) -> str:
    indent = " " * (_LABEL + 2)
    return textwrap.fill(
        text, _WIDTH, initial_indent=f"  {label:<{_LABEL}}", subsequent_indent=indent + "  " * text.startswith("- "),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
