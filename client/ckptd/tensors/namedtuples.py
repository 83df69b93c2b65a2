"""Which classes and values are namedtuples as collections.namedtuple makes them, so that it can make them again."""

from __future__ import annotations

from keyword import iskeyword
from typing import Any


def could_be_made(name: str, fields: Any) -> bool:
    """Whether namedtuple makes a class of these: distinct names, or as rename=True puts it, `_` and their number.

    Args:
        name: The class's qualified name.
        fields: What it has as `_fields`.
    """
    if not isinstance(fields, tuple):
        return False
    names = (name.rpartition(".")[2], *fields)
    return (
        all(type(one) is str and one.isidentifier() and not iskeyword(one) for one in names)
        and len(set(fields)) == len(fields)
        and all(field[0] != "_" or field == f"_{number}" for number, field in enumerate(fields))
    )


def is_all_fields(value: tuple[Any, ...]) -> bool:
    """Whether an instance of such a class has a value for each field, and no attributes beside them."""
    fields: tuple[str, ...] = type(value)._fields  # type: ignore[attr-defined]
    return tuple.__len__(value) == len(fields) and not getattr(value, "__dict__", None)
