"""The retention policy of a run: which verified checkpoints stay. Pure values; `retention` applies them.

Also the spellings that the command line and the settings file share: "val_loss:min", "6h", "5GB".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast

from ckptd.errors import InvalidArgument

Mode = Literal["min", "max"]

_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)
MAX_KEPT: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Which verified checkpoints of the line stay. The rules add up: what any of them keeps, stays.

    Whatever the policy says, these stay too: the newest verified checkpoint, everything newer than it, the
    best by `monitor`, and everything that isn't this run's own.

    Attributes:
        keep_last: The newest K verified ones; 0 turns the rule off. Default 5.
        keep_best: The best K verified ones by `monitor`; 0 (default) turns the rule off, though the one best
            is kept whenever `monitor` is given.
        monitor: Name of the metric that says what is best; None (default): no metric.
        mode: Whether smaller ("min") or larger ("max") is better. Required with `monitor`, never guessed.

    Raises:
        InvalidArgument: A policy that would keep nothing, a metric without min or max, a number out of range.
    """

    keep_last: int = 5
    keep_best: int = 0
    monitor: str | None = None
    mode: Mode | None = None

    def __post_init__(self) -> None:
        _check_count("keep_last", self.keep_last)
        _check_count("keep_best", self.keep_best)
        _check_metric(self.monitor, self.mode)
        if self.keep_best and self.monitor is None:
            raise InvalidArgument(
                "best by which metric?", where="keep_best",
                seen=f"keep_best = {self.keep_best} without a metric", wanted="monitor and mode beside it",
                todo="give --monitor NAME:min or NAME:max",
            )  # fmt: skip
        if self.keep_last == 0 and self.keep_best == 0:
            raise InvalidArgument(
                "a policy that would keep nothing", where="keep_last", seen="keep_last = 0 and keep_best = 0",
                wanted="at least one of them 1 or more", todo="give --keep-last 1 or more",
            )  # fmt: skip


def parse_monitor(text: str) -> tuple[str, Mode]:
    """("val_loss", "min") from "val_loss:min". The name may itself hold colons.

    Raises:
        InvalidArgument: No min or max, or no name.
    """
    name, _, mode = text.rpartition(":")
    if not name or mode not in ("min", "max"):
        raise InvalidArgument(
            "a metric needs min or max", where="monitor", seen=repr(text), wanted="NAME:min or NAME:max",
            todo="say which is better, smaller or larger",
        )  # fmt: skip
    return name, cast(Mode, mode)


def parse_duration_s(text: str, *, where: str = "duration") -> float:
    """Seconds from "90", "90s", "10m", "6h" or "2d".

    Raises:
        InvalidArgument: Anything else.
    """
    number, unit = _quantity(text, where, "a duration such as 90s, 10m, 6h or 2d")
    if unit not in _SECONDS:
        raise InvalidArgument(
            "not a duration", where=where, seen=repr(text), wanted="a unit out of s, m, h, d"
        )
    return number * _SECONDS[unit]


def _quantity(text: str, where: str, wanted: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidArgument("can't be read", where=where, seen=repr(text), wanted=wanted)
    return float(match[1]), match[2].lower()


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_KEPT:
        raise InvalidArgument(
            "not a number of checkpoints", where=name, seen=repr(value), wanted=f"an int from 0 to {MAX_KEPT}"
        )


def _check_metric(monitor: object, mode: object) -> None:
    if monitor is not None and (not isinstance(monitor, str) or not monitor or len(monitor) > 200):
        raise InvalidArgument("not the name of a metric", where="monitor", seen=repr(monitor)[:300])
    if mode is not None and mode not in ("min", "max"):
        raise InvalidArgument("unknown mode", where="mode", seen=repr(mode)[:300], wanted='"min" or "max"')
    if (monitor is None) != (mode is None):
        raise InvalidArgument(
            "a metric needs min or max" if mode is None else "min or max of which metric?",
            where="monitor", seen=f"monitor = {monitor!r}, mode = {mode!r}", wanted="both or neither",
            todo="give --monitor NAME:min or NAME:max",
        )  # fmt: skip
