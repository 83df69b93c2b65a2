"""Typed key paths: where in a state a value is, for error messages and for tables on disk.

A path is a tuple of plain keys. Keys that Python calls equal but that aren't the same (1, True, 1.0) and keys
that only look alike (1, "1") stay apart in both spellings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from ckptd.errors import CorruptCheckpoint
from ckptd.limits import MAX_TREE_DEPTH

Path: TypeAlias = tuple[Any, ...]

#: Keys at each end of a path that is shown shortened.
_END: Final = 4

_AS_THEMSELVES: Final = frozenset({str, int})  # in JSON
_SCALARS = frozenset({str, int, bool, float, type(None), bytes})


def is_key(value: object, levels: int = MAX_TREE_DEPTH) -> bool:
    """Whether value may be a key in a state: str, int, bool, float, None, bytes, or a tuple of those.

    Args:
        value: Any object.
        levels: How deep its tuples may be nested.
    """
    if type(value) is tuple:
        return _SCALARS.issuperset(map(type, value)) or (
            levels > 1 and all(is_key(part, levels - 1) for part in value)
        )
    return type(value) in _SCALARS


def show(path: Iterable[Any]) -> str:
    """`state['model']['h.0.weight'][3]`: a path as a reader would write it in Python."""
    return "state" + "".join(f"[{text(key)}]" for key in path)


def show_ends(path: Path) -> str:
    """As `show`, of a long path only how it begins and ends."""
    left_out = len(path) - 2 * _END
    if left_out <= 0:
        return show(path)
    end = "".join(f"[{text(key)}]" for key in path[-_END:])
    return f"{show(path[:_END])}…({left_out} more)…{end}"


def text(value: Any, at: int = 400) -> str:
    """repr(value) cut to `at` characters; also of what has none, as an int of more than 4300 digits."""
    try:
        shown = repr(value)
    except Exception as error:  # noqa: BLE001 - a message is being made: another error would hide what it is about
        shown = hex(value) if type(value) is int else f"<{type(value).__qualname__}: {type(error).__name__}>"
    return shown if len(shown) <= at else shown[:at] + "…"


def to_json(path: Iterable[Any]) -> list[Any]:
    """The JSON form of a path: str and int as themselves, any other key as a dict of one entry: its type."""
    return [_key_to_json(key) for key in path]


def _key_to_json(key: Any) -> Any:
    kind = type(key)
    if kind is str or kind is int:
        return key
    if kind is bool:
        return {"bool": key}
    if kind is float:
        return {"float": key.hex()}
    if key is None:
        return {"none": None}
    if kind is bytes:
        return {"bytes": key.hex()}
    if kind is tuple:
        return {"tuple": [_key_to_json(part) for part in key]}
    raise TypeError(f"{kind.__name__} is not a plain key")


def from_json(value: object) -> Path:
    """The path that `to_json` wrote.

    Raises:
        CorruptCheckpoint: value isn't a list of keys in exactly the form to_json gives.
    """
    if type(value) is not list:
        raise _not_a_path(value)
    if _AS_THEMSELVES.issuperset(map(type, value)):
        return tuple(value)
    return tuple(map(_key_from_json, value))


def _key_from_json(value: object) -> Any:
    if type(value) is str or type(value) is int:
        return value
    if type(value) is not dict or len(value) != 1:
        raise _not_a_path(value)
    ((kind, inner),) = value.items()
    if kind == "none" and inner is None:
        return None
    if kind == "bool" and type(inner) is bool:
        return inner
    if kind == "tuple" and type(inner) is list:
        return tuple(_key_from_json(part) for part in inner)
    if kind in ("float", "bytes") and type(inner) is str:
        return _from_text(kind, inner)
    raise _not_a_path(value)


def _from_text(kind: str, spelled: str) -> float | bytes:
    try:
        key: float | bytes = float.fromhex(spelled) if kind == "float" else bytes.fromhex(spelled)
    except (ValueError, OverflowError) as error:
        raise _not_a_path({kind: spelled}) from error
    if key.hex() != spelled:  # one spelling for each key, so that equal paths have equal bytes
        raise _not_a_path({kind: spelled})
    return key


def _not_a_path(value: object) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        "not a key path", seen=text(value, 200), wanted="a list of keys as keypath.to_json writes it"
    )
