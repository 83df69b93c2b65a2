"""A result as JSON, as tables for a terminal and as a part of a page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lines import Outcome, controls, evaluate
from rounds import Course
from samples import Samples, Spread
from settings import Settings

SCHEMA: Final = "ckptd.bench-1"

_BEGIN, _END = "<!-- scripts/bench --markdown writes from here -->", "<!-- to here -->"
_MEASURES: Final = (
    "stall", "done", "verified", "commit", "retention", "daemon's CPU", "latest, command", "latest_valid()", "start",
)  # fmt: skip
_NOISE: Final = (
    "The same thing twice in each round, one time against the other: 1.00 would be no noise at all"
)

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """What is shown: a title, a head and rows of as many cells."""

    title: str
    head: Row
    rows: Sequence[Row]

    def as_markdown(self) -> str:
        """With the title as a heading."""
        rows = [self.head, ("---",) * len(self.head), *self.rows]
        return f"### {self.title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"

    def as_text(self) -> str:
        """In columns; the last one isn't filled up."""
        rows = [self.head, *self.rows]
        widths = [max(len(row[at]) for row in rows) for at in range(len(self.head) - 1)]
        lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)
        return f"{self.title}\n\n" + "\n".join(f"  {line}" for line in lines) + "\n"


def around(page: Path) -> tuple[str, str]:
    """What a page has before and behind the result.

    Raises:
        ValueError: It has no markers.
        OSError: It can't be read.
    """
    before, begin, rest = page.read_text("utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page}: no markers; put in: {_BEGIN} and {_END}")
    return before, after


@dataclass(frozen=True)
class Report:
    """One benchmark's result.

    Attributes:
        seconds: It took.
        at: When it began, UTC.
    """

    settings: Settings
    machine: dict[str, str]
    course: Course
    seconds: float
    at: str

    @property
    def lines(self) -> list[Outcome]:
        """Every line's answer."""
        return evaluate(self.course.samples)

    def as_json(self) -> dict[str, Any]:
        """Everything: what was asked, on what, every number, every line."""
        return {
            "schema": SCHEMA, "at": self.at, "seconds": self.seconds, "machine": self.machine,
            "settings": self.settings.as_json(),
            "lines": [line.as_json() for line in self.lines],
            "controls": {name: asdict(spread) for name, spread in controls(self.course.samples).items()},
            "contestants": self.course.about, "skipped": self.course.skipped,
            "samples": self.course.samples.as_json(),
        }  # fmt: skip

    def tables(self) -> list[Table]:
        """Machine, lines, noise, everybody's times."""
        machine = [*self.machine.items(), ("measured", self._when())]
        noise = [
            (name, f"{one.median:.2f}", _range(one)) for name, one in controls(self.course.samples).items()
        ]
        found = [
            Table("The machine", ("", ""), machine),
            Table(
                "The lines", ("what", "goal", "measured", "spread", "n", "", ""), list(map(_line, self.lines))
            ),
            Table(_NOISE, ("control", "median", "spread"), noise),
            *self._sections(),
        ]
        skipped = list(self.course.skipped.items())
        return [*found, Table("Left out", ("", ""), skipped)] if skipped else found

    def as_text(self) -> str:
        """For a terminal."""
        return "\n".join(table.as_text() for table in self.tables())

    def into_page(self, page: Path) -> None:
        """Replace what lies between the page's markers.

        Raises:
            ValueError: It has none.
        """
        before, after = around(page)
        tables = "\n".join(table.as_markdown() for table in self.tables())
        page.write_text(f"{before}{_BEGIN}\n\n{tables}\n{_END}{after}", "utf-8")

    def _when(self) -> str:
        samples = self.course.samples
        nbytes, tensors = (sum(samples.get("state", "saved", one)) for one in ("bytes", "tensors"))
        state = f"a state of {nbytes / 2**20:.0f} MiB in {tensors:.0f} tensors, {self.settings.rounds} rounds"
        return f"{self.at}, in {self.seconds:.0f} s: {state}"

    def _sections(self) -> Iterator[Table]:
        samples = self.course.samples
        for section, about in self.course.about.items():
            measures = [one for one in _MEASURES if any(samples.get(section, name, one) for name in about)]
            if len(about) > 1:
                rows = [
                    (name, *(_milliseconds(samples, section, name, one) for one in measures), told)
                    for name, told in about.items()
                ]
                yield Table(f"{section}, ms: median (spread)", ("", *measures, ""), rows)


def now() -> str:
    """UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def _line(line: Outcome) -> Row:
    unit = line.unit if line.unit == "×" else f" {line.unit}"
    goal = f"≤ {line.limit:g}{unit}" + (f" of {line.against}" if line.against else "")
    said = {True: "met", False: "short", None: "—"}[line.met]
    if line.value is None or line.low is None or line.high is None:
        return line.what, goal, "—", "", "0", said, line.note
    spread = _range(Spread(line.value, line.low, line.high, line.count))
    return line.what, goal, f"{line.value:.2f}{unit}", spread, f"{line.count}", said, line.note


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f}–{spread.high:.2f}"


def _milliseconds(samples: Samples, section: str, name: str, measure: str) -> str:
    numbers = samples.get(section, name, measure)
    if not numbers:
        return ""
    spread = Spread.of([number * 1e3 for number in numbers])
    return f"{_short(spread.median)} ({_short(spread.low)}–{_short(spread.high)})"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"
