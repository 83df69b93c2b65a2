"""What to do instead, for values that can't be stored: the last clause of a refusal."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final

_BY_CLASS: Final[Mapping[str, str]] = {
    "pathlib.PurePath": "store str(path)",
    "datetime.date": "store value.isoformat()",
    "datetime.time": "store value.isoformat()",
    "datetime.timedelta": "store value.total_seconds(), or its days, seconds and microseconds",
    "decimal.Decimal": "store str(value)",
    "fractions.Fraction": "store (value.numerator, value.denominator)",
    "uuid.UUID": "store str(value)",
    "builtins.slice": "store (value.start, value.stop, value.step)",
    "builtins.memoryview": "store bytes(value)",
    "array.array": "store value.tolist(), or numpy.asarray(value)",
    "argparse.Namespace": "store vars(value)",
    "types.SimpleNamespace": "store vars(value)",
    "collections.UserDict": "store dict(value)",
    "collections.UserList": "store list(value)",
    "numpy.dtype": "store value.str",
    "numpy.ma.MaskedArray": "store value.data and value.mask",
    "numpy.ndarray": "store numpy.asarray(value)",
    "numpy.random.bit_generator.BitGenerator": "store numpy.random.Generator(value)",
    "builtins.dict": "store dict(value)",
    "builtins.list": "store list(value)",
    "builtins.tuple": "store tuple(value)",
    "builtins.set": "store set(value)",
    "builtins.frozenset": "store frozenset(value)",
    "builtins.str": "store str(value)",
    "builtins.bytes": "store bytes(value)",
    "builtins.bytearray": "store bytes(value)",
    "builtins.int": "store int(value)",
    "builtins.float": "store float(value)",
    "builtins.complex": "store complex(value)",
}


def advice(value: Any) -> str:
    """What to store in place of a value of a type that has no form in a file."""
    if isinstance(value, type) or (callable(value) and not _is_data(value)):
        return "store what is needed to make it again, not the function or class itself"
    if has_method(value, "state_dict"):
        return "give it load_state_dict(state) too"
    if _is_data(value):
        return f"ckptd.register_type({type(value).__qualname__})"
    for cls in type(value).__mro__:
        if (
            known := _BY_CLASS.get(f"{str(cls.__module__).partition('._')[0]}.{cls.__qualname__}")
        ) is not None:
            return known
    if isinstance(value, Mapping):
        return "store dict(value), and what lies in it as plain data too"
    if isinstance(value, Iterator):
        return "store how far it has come, and make it again"
    return "store plain data, or give it state_dict() and load_state_dict(state)"


def advice_for_key(key: Any) -> str:
    """What to take in place of a dict key, or of an element of a set, that has no form in a file."""
    if isinstance(key, enum.Enum):
        return "use key.name"
    if type(key).__module__ == "numpy":
        return "use key.item()"
    return "use a string, a number or a tuple of those"


def has_method(value: Any, name: str) -> bool:
    """Whether value.name can be called. A mapping whose attributes are its keys may raise anything when asked."""
    try:
        return callable(getattr(value, name, None))
    except Exception:  # noqa: BLE001 - whatever its __getattr__ raises, it has no such method
        return False


def _is_data(value: Any) -> bool:
    return isinstance(value, enum.Enum) or dataclasses.is_dataclass(type(value))
