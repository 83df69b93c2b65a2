"""Classes that a user registered: dataclasses and enums whose instances are stored as the data they hold.

A file names such a class only by the name it was registered under. Nothing is ever imported by a name from a file:
a name means what this process registered, and without that it means nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

from ckptd.errors import InvalidArgument
from ckptd.snapshot.keypath import is_key

__all__ = ["class_of", "name_of", "register_type"]

T = TypeVar("T")

MAX_NAME_CHARS: Final = 500

_CLASSES: Final[dict[str, type]] = {}
_NAMES: Final[dict[type, str]] = {}

_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not by an extension


@overload
def register_type(cls: type[T], *, name: str | None = None) -> type[T]: ...
@overload
def register_type(*, name: str | None = None) -> Callable[[type[T]], type[T]]: ...
def register_type(cls: type[Any] | None = None, *, name: str | None = None) -> Any:
    """Let instances of a dataclass, or members of an enum, be part of a state. Also a decorator.

        @ckptd.register_type
        @dataclasses.dataclass
        class Progress:
            best: float = inf

    Register it where it is defined, so that the process that saves and the one that loads both do. Of a
    dataclass the fields are stored by name, with whatever a state may hold in them; it is made again without calling
    `__init__` or `__post_init__`, and without the type arguments that `Box[int](3)` notes on it. Of an enum the
    member's name and value are stored. `restore` needs the class registered and unchanged; in `load` a value
    of a class that isn't registered is a `ckptd.tensors.registered_tags.Unbuilt`.

    Args:
        cls: The class.
        name: What files call it. Default: its module and qualified name; give one that a moved class keeps.

    Returns:
        The class itself.

    Raises:
        InvalidArgument: It is neither a dataclass nor an enum, holds more than its fields could say (a builtin base,
            a state_dict() of its own, enum values that are no plain data), or another class has this name.
            Nothing was registered.
    """
    if cls is None:
        return lambda cls: register_type(cls, name=name)
    _check_class(cls)
    chosen = _check_name(f"{cls.__module__}.{cls.__qualname__}" if name is None else name)
    known, other = _NAMES.get(cls, chosen), _CLASSES.get(chosen, cls)
    if known != chosen:
        raise _refused("the class has another name already", cls, seen=chosen, wanted=known)
    if other is not cls:
        raise _refused(
            "another class has this name",
            cls,
            seen=chosen,
            todo="give one of them its own: register_type(cls, name=…)",
        )
    _CLASSES[chosen], _NAMES[cls] = cls, chosen
    return cls


def name_of(cls: type) -> str | None:
    """The name a class was registered under; None when it wasn't."""
    return _NAMES.get(cls)


def class_of(name: str) -> type | None:
    """The class registered under a name; None when there is none."""
    return _CLASSES.get(name)


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type):
        raise InvalidArgument(
            "not a class", where="register_type", seen=repr(cls)[:200], wanted="a dataclass or an enum"
        )
    if issubclass(cls, enum.Enum):
        _check_enum(cls)
    elif dataclasses.is_dataclass(cls):
        _check_dataclass(cls)
    else:
        raise _refused(
            "neither a dataclass nor an enum",
            cls,
            todo="give it state_dict() and load_state_dict(state) instead",
        )


def _check_enum(cls: type[enum.Enum]) -> None:
    if not cls.__members__:
        raise _refused("an enum without members", cls)
    for name, member in cls.__members__.items():
        if not is_key(member._value_):
            raise _refused(
                "an enum whose values are no plain data", cls, seen=f"{name} = {member._value_!r}"[:200],
                wanted="str, int, bool, float, None, bytes or a tuple of those",
            )  # fmt: skip


def _check_dataclass(cls: type) -> None:
    if callable(getattr(cls, "state_dict", None)) and callable(getattr(cls, "load_state_dict", None)):
        raise _refused("it has a state of its own", cls, todo="nothing to register: state_dict() is used")
    for base in cls.__mro__[:-1]:
        if not base.__flags__ & _HEAP_TYPE and "__new__" in vars(base):
            raise _refused(
                "a dataclass that is also a builtin", cls, seen=base.__qualname__, todo="make that a field"
            )
    if inspect.isabstract(cls):
        raise _refused("an abstract class has no instances", cls)


def _check_name(name: Any) -> str:
    if type(name) is str and 0 < len(name) <= MAX_NAME_CHARS:
        try:
            name.encode()
            return name
        except UnicodeEncodeError:
            pass
    raise InvalidArgument(
        "not a name",
        where="register_type",
        seen=ascii(name)[:200],
        wanted=f"a string of 1 to {MAX_NAME_CHARS} characters",
    )


def _refused(what: str, cls: type, *, seen: str = "", wanted: str = "", todo: str = "") -> InvalidArgument:
    where = f"register_type({cls.__qualname__})"
    return InvalidArgument(what, where=where, seen=seen, wanted=wanted, todo=todo)
