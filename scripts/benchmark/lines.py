"""The lines of the speed table: what each asks, and the answer that the raw numbers give. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import answers
from answers import STEADY, Answer, simple
from samples import Samples, Spread, pairwise, percentile


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        key: Its name in the JSON.
        what: What is measured.
        against: With what it is compared.
        limit: The goal: the value must not be above it.
        unit: Of limit and value; "×" for a ratio.
        answer: The numbers, one per round, out of the samples; none when it wasn't measured.
        value: What is made of them: the median, but for a tail.
    """

    key: str
    what: str
    against: str
    limit: float
    unit: str
    answer: Callable[[Samples], Answer]
    value: Callable[[Sequence[float]], float] = statistics.median


@dataclass(frozen=True)
class Outcome:
    """A line's answer.

    Attributes:
        low, high: The quartiles of the numbers, or their extremes when there are fewer than five.
        count: How many numbers.
        met: None when it wasn't measured, or doesn't apply.
    """

    key: str
    what: str
    against: str
    limit: float
    unit: str
    value: float | None
    low: float | None
    high: float | None
    count: int
    met: bool | None
    note: str

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def evaluate(samples: Samples) -> list[Outcome]:
    """Every line, also those without an answer."""
    return [_outcome(line, samples) for line in LINES]


def controls(samples: Samples) -> dict[str, Spread]:
    """The same thing done twice in each round, one time against the other: the noise. 1.00 would be none."""
    found = {}
    for section, control, first, measure in _CONTROLS:
        pair = samples.get(section, control, measure), samples.get(section, first, measure)
        if all(pair):
            found[f"{section}: {first}"] = Spread.of(pairwise(*pair))
    return found


def _outcome(line: Line, samples: Samples) -> Outcome:
    numbers, note = line.answer(samples)
    told = (line.key, line.what, line.against, line.limit, line.unit)
    if not numbers:
        return Outcome(*told, None, None, None, 0, None, note or "not measured")
    spread, value = Spread.of(numbers), line.value(numbers)
    return Outcome(*told, value, spread.low, spread.high, spread.count, value <= line.limit, note)


_CONTROLS: Final = (
    ("save", "control: flat copy_, again", "flat copy_", "done"),
    ("save", "control: raw write, buffered, again", "raw write, buffered", "done"),
    ("restore, cold", "control: torch.load + copy, again", "torch.load + copy", "done"),
    ("restore, warm", "control: torch.load + copy, again", "torch.load + copy", "done"),
    ("tiny state", "control: atomic replace, again", "atomic replace", "done"),
    ("training step", "idle again", "idle", "median"),
)

_OURS: Final = ("ckptd", "done")
_LOADED: Final = ("torch.load + copy", "done")
_ONE: Final = "the same with the fewest"


def _p99(numbers: Sequence[float]) -> float:
    return percentile(numbers, 0.99)


LINES: Final = (
    Line("stall", "stall of a warm snapshot()", "one flat copy_, 1 thread", 1.0, "×", answers.stall),
    Line("stall_small", "the same, small tensors", "", 10.0, "µs a tensor", answers.stall_of_small),
    Line("stall_tail", "p99 of a stall while the daemon writes", "the median of one while it doesn't",
         1.5, "×", answers.tail, _p99),
    Line("first", "first snapshot after reserve()", "a warm one", 1.25, "×", answers.first),
    Line("durable", "durable, hashed, indexed", "the slower of best raw write and SHA-256 on all cores",
         1.15, "×", answers.durable),
    Line("durable_torch", "durable, beside torch.save + fsync", "torch.save + fsync",
         0.55, "×", simple("save", _OURS, ("torch.save + fsync", "done"))),
    Line("verified", "durable, then re-read and re-hashed", "best raw write + best raw uncached read",
         1.2, "×", answers.verified),
    Line("restore_cold", "cold restore, every hash checked", "torch.load + copy, unchecked",
         0.6, "×", simple("restore, cold", _OURS, _LOADED)),
    Line("restore_warm", "warm restore, every hash checked", "the same, warm",
         1.8, "×", simple("restore, warm", _OURS, _LOADED)),
    Line("memory_2", "extra memory, both sides, 2 slots", "1.02 × state a slot + 32 MiB",
         1.0, "×", answers.memory(2)),
    Line("memory_1", "extra memory, both sides, 1 slot", "1.02 × state a slot + 32 MiB",
         1.0, "×", answers.memory(1)),
    Line("training", "training step while a save runs", "a step while the daemon is idle",
         1.05, "×", answers.training),
    Line("tiny_stall", "snapshot() of a tiny state", "", 1.0, "ms", simple("tiny state", ("ckptd", "stall"), scale=1e3)),
    Line("tiny_durable", "a tiny state, durable", "one temp + fsync + replace + folder fsync",
         5.0, "×", simple("tiny state", _OURS, ("atomic replace", "done"))),
    Line("growth_tensors", "stall a tensor, most tensors", "the same with the next fewer", STEADY, "×", answers.linear),
    Line("growth_commit", "commit, most checkpoints", _ONE, STEADY, "×", answers.flat("commit")),
    Line("growth_latest", "`ckptd latest`, most checkpoints", _ONE, STEADY, "×", answers.flat("latest, command")),
    Line("growth_latest_valid", "latest_valid(), most checkpoints", _ONE, STEADY, "×", answers.flat("latest_valid()")),
    Line("growth_retention", "CPU of a commit with its retention, most", _ONE, STEADY, "×", answers.flat("daemon's CPU")),
)  # fmt: skip
