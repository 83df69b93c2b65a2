"""Metrics as callers hand them in, made plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptd.errors import InvalidArgument
from ckptd.limits import MAX_METRICS, MAX_NAME_BYTES


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Name → float, from whatever has `__float__`: numbers, NumPy scalars, one-element tensors.

    Raises:
        InvalidArgument: Not a mapping, a name that isn't a short string, a value that isn't a number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidArgument(
            "not a dict", where="metrics", seen=type(metrics).__name__, wanted="name → number"
        )
    if len(metrics) > MAX_METRICS:
        raise InvalidArgument(
            "too many", where="metrics", seen=str(len(metrics)), wanted=f"at most {MAX_METRICS}"
        )
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES:
        raise InvalidArgument(
            "not a name",
            where="metrics",
            seen=repr(name)[:100],
            wanted=f"a string of 1 to {MAX_NAME_BYTES} bytes",
        )
    return str(name)


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)) or value is None:
            raise TypeError
        # A loss with a graph: torch warns when such a tensor is converted.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(
            "not a number", where=f"metrics[{name!r}]", seen=f"{type(value).__name__} {value!r}"[:100],
            wanted="a number, NumPy scalar or one-element tensor",
        ) from error  # fmt: skip
