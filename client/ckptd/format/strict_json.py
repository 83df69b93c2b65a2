"""JSON that has one spelling: what we write is canonical, and what we read is refused unless it is strict.

The standard library's parser accepts duplicate keys, NaN tokens, numbers that overflow to infinity and lone
surrogates; each would let two readers see different things in the same file. Hooks refuse them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ckptd.errors import CorruptCheckpoint
from ckptd.limits import MAX_JSON_DEPTH

_FLOAT_TAG: Final = "__float__"
_COMPACT: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def canonical(obj: Any) -> bytes:
    """The one spelling of obj for people to read: sorted keys, two spaces, a final newline, ASCII only.

    Raises:
        TypeError, ValueError: obj holds what JSON can't spell, NaN and infinities among it.
    """
    return (json.dumps(obj, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")


def compact(obj: Any) -> bytes:
    """The one spelling of obj for large tables: sorted keys, no spaces, a final newline, ASCII only.

    Raises:
        TypeError, ValueError: As for canonical.
    """
    return (_COMPACT.encode(obj) + "\n").encode("ascii")


def parse(data: bytes, *, where: str, max_bytes: int) -> Any:
    """Parse strict JSON.

    Args:
        data: The whole file.
        where: Path for the error.
        max_bytes: The named limit for this kind of file.

    Raises:
        CorruptCheckpoint: Too long or too deep, no UTF-8, no JSON, a key given twice, a NaN or infinity, a
            lone surrogate.
    """
    if len(data) > max_bytes:
        raise CorruptCheckpoint(
            "too long", where=where, seen=f"{len(data)} bytes", wanted=f"at most {max_bytes}"
        )
    try:
        obj = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint("not strict JSON", where=where, seen=str(error)[:200]) from error
    _check_tree(obj, where, has_escapes=b"\\u" in data)
    return obj


def float_to_json(value: float) -> Any:
    """A float as strict JSON: itself when finite, else {"__float__": "nan" | "inf" | "-inf"}."""
    value = float(value)
    if math.isfinite(value):
        return value
    return {_FLOAT_TAG: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def float_from_json(obj: Any, *, where: str = "") -> float:
    """The float that float_to_json spelled.

    Raises:
        CorruptCheckpoint: obj is no number and no tagged one.
    """
    if isinstance(obj, float) or (isinstance(obj, int) and not isinstance(obj, bool)):
        try:
            return float(obj)
        except OverflowError as error:
            raise CorruptCheckpoint("not a float", where=where, seen="an int beyond a float") from error
    if isinstance(obj, Mapping) and set(obj) == {_FLOAT_TAG}:
        tag = obj[_FLOAT_TAG]
        if isinstance(tag, str) and tag in _NON_FINITE:
            return _NON_FINITE[tag]
    raise CorruptCheckpoint("not a float", where=where, seen=repr(obj)[:80], wanted="a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    obj = dict(pairs)
    if len(obj) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]  # one pass, however many there are
        raise ValueError(f"key given twice: {twice[:80]!r}")
    return obj


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number out of range: {text[:40]}")
    return value


def _check_tree(obj: Any, where: str, *, has_escapes: bool) -> None:
    """Check depth, and that every string is text; level by level, so that depth costs no recursion."""
    level: list[Any] = [obj]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH + 1:
            raise CorruptCheckpoint(
                "nested too deeply", where=where, wanted=f"at most {MAX_JSON_DEPTH} levels"
            )
        below: list[Any] = []
        for node in level:
            kind = type(node)
            if kind is dict:
                below.extend(node.values())
                if has_escapes:
                    below.extend(node)
            elif kind is list:
                below.extend(node)
            elif has_escapes and kind is str:
                _check_text(node, where)
        level = below


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorruptCheckpoint(
            "not strict JSON", where=where, seen="a lone surrogate in a string"
        ) from error
