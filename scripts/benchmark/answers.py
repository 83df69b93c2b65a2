"""What the raw numbers say to each line of the speed table: one number per round, and a note. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

from samples import Samples, Spread, pairwise, percentile

Answer = tuple[list[float], str]  # one number per round, and a note; no numbers when it wasn't measured

STEADY: Final = 1.5  #: how "flat" and "linear" are read here

_MIB: Final = 1 << 20
_LARGE_MEAN_BYTES: Final = 256 * 1024
_LIMIT_SLACK: Final = 32 * _MIB

_WRITES: Final = (
    "raw write, buffered", "raw write, sync_file_range", "raw write, O_DIRECT", "raw write, O_DIRECT, all cores",
)  # fmt: skip
_READS: Final = ("raw read, O_DIRECT", "raw read, O_DIRECT, all cores", "raw read, buffered, all cores")


def stall(samples: Samples) -> Answer:
    mean = _state_bytes(samples) / max(1.0, sum(samples.get("state", "saved", "tensors")))
    if mean < _LARGE_MEAN_BYTES:
        return (
            [],
            f"doesn't apply: the mean tensor has {mean / 1024:.0f} KiB, and the next line is for less than 256",
        )
    numbers = _ratio(samples, "save", ("ckptd", "stall"), ("flat copy_", "done"))
    reached = "reached" if numbers and statistics.median(numbers) <= 0.75 else "not reached"
    return numbers, f"stretch 0.75× {reached}; mean tensor {mean / 1024:.0f} KiB"


def stall_of_small(samples: Samples) -> Answer:
    counts = _counts(samples, "number of tensors")
    if not counts:
        return [], ""
    count = 10_000 if 10_000 in counts else counts[-1]
    stalls = samples.get("number of tensors", f"{count}", "stall")
    return [stall / count * 1e6 for stall in stalls], f"{count} tensors of 256 bytes"


def tail(samples: Samples) -> Answer:
    quiet, busy = (samples.get("stall while writing", "ckptd", one) for one in ("quiet", "busy"))
    if not busy:
        return [], "no snapshot fell into the writing of another" if quiet else ""
    middle = statistics.median(quiet)
    own = percentile(busy, 0.99) / statistics.median(busy)
    largest = "" if len(busy) >= 100 else f"; of {len(busy)} the largest"
    return [
        one / middle for one in busy
    ], f"against its own median while the daemon writes {own:.2f}×{largest}"


def first(samples: Samples) -> Answer:
    numbers = []
    for contestant in samples.contestants("first snapshot"):
        numbers += _ratio(samples, "first snapshot", (contestant, "first"), (contestant, "warm"))
    return numbers, "each in a process of its own"


def durable(samples: Samples) -> Answer:
    write, writes = samples.best("save", _WRITES, "done")
    name, against = write, writes
    hashes = samples.get("save", "SHA-256, all cores", "done")
    if writes and hashes and statistics.median(hashes) > statistics.median(writes):
        name, against = "SHA-256, all cores", hashes
    return _paired(
        samples.get("save", "ckptd", "done"), against
    ), f"the slower is {name}; the best write is {write}"


def verified(samples: Samples) -> Answer:
    write, writes = samples.best("save", _WRITES, "done")
    read, reads = samples.best("save", _READS, "done")
    both = [one + other for one, other in zip(writes, reads, strict=False)]
    return _paired(samples.get("save", "ckptd", "verified"), both), f"{write} + {read}"


def memory(slots: int) -> Callable[[Samples], Answer]:
    def answer(samples: Samples) -> Answer:
        extra, state, before, trainer, daemon = (
            samples.get("memory", f"slots={slots}", one)
            for one in ("extra", "state", "before", "trainer", "daemon")
        )
        if not extra:
            return [], ""
        limits = [1.02 * slots * each + _LIMIT_SLACK for each in state]
        grown = [one - other for one, other in zip(trainer, before, strict=True)]
        note = (
            f"{_mib(extra)} MiB more than before, trainer {_mib(grown)}, daemon and verifier {_mib(daemon)}, "
            f"for slots of {_mib(state)}; the limit is {_mib(limits)}"
        )
        return [one / limit for one, limit in zip(extra, limits, strict=True)], note

    return answer


def training(samples: Samples) -> Answer:
    saving, idle, again = (
        samples.get("training step", one, "median") for one in ("saving", "idle", "idle again")
    )
    means = [samples.get("training step", one, "mean") for one in ("saving", "idle", "idle again")]
    if not saving:
        return [], ""
    drift = Spread.of(pairwise(again, idle))
    mean = statistics.median(_beside(*means))
    steps = sum(samples.get("training step", "saving", "steps"))
    return _beside(saving, idle, again), (
        f"idle against idle {drift.median:.2f}× ({drift.low:.2f}–{drift.high:.2f}); "
        f"of mean steps {mean:.2f}×; {steps:.0f} steps beside saves"
    )


def _beside(saving: list[float], idle: list[float], again: list[float]) -> list[float]:
    return pairwise(saving, [(one + other) / 2 for one, other in zip(idle, again, strict=True)])


def linear(samples: Samples) -> Answer:
    counts = _counts(samples, "number of tensors")
    if len(counts) < 2:
        return [], ""
    large, small = counts[-1], counts[-2]
    stalls = _ratio(samples, "number of tensors", (f"{large}", "stall"), (f"{small}", "stall"))
    return [one * small / large for one in stalls], f"{large} against {small}; linear is read as ≤ {STEADY}×"


def flat(measure: str) -> Callable[[Samples], Answer]:
    def answer(samples: Samples) -> Answer:
        counts = _counts(samples, "number of checkpoints")
        if len(counts) < 2:
            return [], ""
        large, small = f"{counts[-1]}", f"{counts[0]}"
        numbers = _ratio(samples, "number of checkpoints", (large, measure), (small, measure))
        seconds = [samples.get("number of checkpoints", one, measure) for one in (small, large)]
        low, high = (statistics.median(one) * 1e3 if one else 0.0 for one in seconds)
        return numbers, f"{low:.1f} → {high:.1f} ms; flat is read as ≤ {STEADY}×"

    return answer


# --- parts ----------------------------------------------------------------------------------------


def _mib(numbers: list[float]) -> str:
    return f"{statistics.median(numbers) / _MIB:.0f}"


def _state_bytes(samples: Samples) -> float:
    return sum(samples.get("state", "saved", "bytes"))


def _counts(samples: Samples, section: str) -> list[int]:
    return sorted(int(name) for name in samples.contestants(section))


def _ratio(
    samples: Samples, section: str, measured: tuple[str, str], against: tuple[str, str]
) -> list[float]:
    return _paired(samples.get(section, *measured), samples.get(section, *against))


def _paired(measured: list[float], against: list[float]) -> list[float]:
    return pairwise(measured, against) if measured and against else []


def simple(
    section: str, measured: tuple[str, str], against: tuple[str, str] | None = None, scale: float = 1.0
) -> Callable[[Samples], Answer]:
    def answer(samples: Samples) -> Answer:
        if against is None:
            return [one * scale for one in samples.get(section, *measured)], ""
        return _ratio(samples, section, measured, against), ""

    return answer
