"""Strict reading of a parsed JSON object: each field is taken by type and limit; none may be left over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ckptd.errors import CorruptCheckpoint

_MAX_COUNT: Final = 2**62
_MAX_TEXT: Final = 4096
_HEX: Final = frozenset("0123456789abcdef")


class Fields:
    """The fields of one object.

    Every method raises CorruptCheckpoint when the field is missing, has another type (a bool is no int), or
    is beyond its limit.
    """

    def __init__(self, obj: Any, where: str) -> None:
        if not isinstance(obj, dict):
            raise CorruptCheckpoint("not a JSON object", where=where, seen=type(obj).__name__)
        self.where = where
        self._obj = obj
        self._taken: set[str] = set()

    def __repr__(self) -> str:
        return f"<Fields {sorted(self._obj)} of {self.where}>"

    def wrong(self, name: str, value: Any, wanted: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"field {name!r} is wrong", where=self.where, seen=repr(value)[:80], wanted=wanted
        )

    def take(self, name: str) -> Any:
        if name not in self._obj:
            raise CorruptCheckpoint(f"field {name!r} is missing", where=self.where)
        self._taken.add(name)
        return self._obj[name]

    def end(self) -> None:
        """Raise if there is a field nobody took."""
        if len(self._taken) != len(self._obj):
            extra = sorted(set(self._obj) - self._taken)
            raise CorruptCheckpoint(f"unknown field {extra[0][:80]!r}", where=self.where)

    def text(self, name: str, max_length: int = _MAX_TEXT) -> str:
        value = self.take(name)
        if type(value) is not str or len(value) > max_length:
            raise self.wrong(name, value, f"text of at most {max_length} characters")
        return value

    def choice(self, name: str, among: Sequence[str]) -> str:
        value = self.text(name)
        if value not in among:
            raise self.wrong(name, value, " or ".join(among))
        return value

    def count(self, name: str, most: int = _MAX_COUNT) -> int:
        value = self.take(name)
        if type(value) is not int or not 0 <= value <= most:
            raise self.wrong(name, value, f"an int from 0 to {most}")
        return value

    def count_or_none(self, name: str) -> int | None:
        return None if self.take(name) is None else self.count(name)

    def number(self, name: str) -> float:
        value = self.take(name)
        if type(value) is not float:
            raise self.wrong(name, value, "a float")
        return value

    def hexdigest(self, name: str, length: int = 64) -> str:
        value = self.take(name)
        if type(value) is not str or len(value) != length or not _HEX.issuperset(value):
            raise self.wrong(name, value, f"{length} hex digits")
        return value

    def hexdigest_or_none(self, name: str) -> str | None:
        return None if self.take(name) is None else self.hexdigest(name)

    def items(self, name: str, most: int) -> list[Any]:
        value = self.take(name)
        if type(value) is not list or len(value) > most:
            raise self.wrong(name, value, f"a list of at most {most}")
        return value

    def objects(self, name: str, most: int) -> list[Fields]:
        return [Fields(obj, f"{self.where}: {name}[{at}]") for at, obj in enumerate(self.items(name, most))]

    def texts(self, name: str, most: int = 1000) -> tuple[str, ...]:
        values = self.items(name, most)
        if any(type(value) is not str or len(value) > _MAX_TEXT for value in values):
            raise self.wrong(name, values, "texts")
        return tuple(values)

    def by_name(self, name: str, most: int) -> dict[str, Any]:
        value = self.take(name)
        if type(value) is not dict or len(value) > most:
            raise self.wrong(name, value, f"an object of at most {most} fields")
        return value

    def text_by_name(self, name: str, most: int = 100) -> dict[str, str]:
        value = self.by_name(name, most)
        if any(type(text) is not str or len(text) > _MAX_TEXT for text in value.values()):
            raise self.wrong(name, value, "texts by name")
        return value
