"""The two tags of registered classes: an instance as its fields by name, an enum's member as its name and value.

| kind | other keys |
|---|---|
| dataclass | class (the name it was registered under), fields (names), items (their values) |
| enum | class, members (the member's name; a flag's names, 0 or more), value |

Reading builds an instance only of a class that this process registered and that still has those fields or members;
anything else becomes an `Unbuilt`, so that the rest of a checkpoint can be looked at. No code of the class is run.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from ckptd.errors import StateMismatch, UnstorableState
from ckptd.registered import class_of, name_of
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.snapshot.values import SCALARS

#: What typing notes on an instance of Box[int]: of use to type checkers at run time only, and no data.
_TYPE_ARGUMENTS: Final = "__orig_class__"


class Unbuilt:
    """What a checkpoint holds of a registered class's instance that this process can't make.

    Attributes:
        class_name: The name the class was registered under.
        content: A dataclass's fields by name, or an enum's `members` and `value`.
        reason: Why it wasn't made.
        registered: Whether a class of this name is registered here, and differs from the one that was saved.
    """

    def __init__(self, class_name: str, content: dict[str, Any], reason: str, *, registered: bool) -> None:
        self.class_name, self.content = class_name, content
        self.reason, self.registered = reason, registered

    def __repr__(self) -> str:
        return f"<Unbuilt {self.class_name}: {self.reason}>"


# --- storing ----------------------------------------------------------------------------------------


def encode_registered(
    value: Any, path: Path, walk: Callable[[Any, Path], Any]
) -> tuple[str, dict[str, Any]] | None:
    """The tag's kind and its other keys for an instance of a registered class; None when its class isn't registered.

    Raises:
        UnstorableState: It holds more than its fields say, a field has no value, or a flag has nameless bits.
    """
    name = name_of(type(value))
    if name is None:
        return None
    if isinstance(value, enum.Enum):
        return "enum", {"class": name, "members": _members_of(value, path), "value": value._value_}
    fields = field_names(type(value))
    _check_only_fields(value, fields, path)
    items = [walk(_field(value, field, path), (*path, field)) for field in fields]
    return "dataclass", {"class": name, "fields": list(fields), "items": items}


def field_names(cls: type) -> tuple[str, ...]:
    """The names of a dataclass's fields, in their order."""
    return tuple(field.name for field in dataclasses.fields(cls))


def _members_of(value: enum.Enum, path: Path) -> list[str]:
    names = _flags_in(value) if isinstance(value, enum.Flag) else [value.name]
    if _member(type(value), names) is not value:
        raise UnstorableState(
            "an enum member that no name leads to", where=keypath.show(path), seen=keypath.text(value, 200),
            todo="store its value, or give each of its bits a member",
        )  # fmt: skip
    return names


def _flags_in(value: enum.Flag) -> list[str]:
    """Members that together are value: those of one bit, then those of several whose bits no other has alone."""
    members = type(value).__members__.items()
    inside = [
        (m._value_, name) for name, m in members if name == m._name_ and m._value_ & ~value._value_ == 0
    ]
    names, bits = [], 0
    for more, name in sorted(inside, key=lambda member: member[0].bit_count() > 1):
        if more & ~bits:
            names.append(name)
            bits |= more
    return names


def _field(value: Any, field: str, path: Path) -> Any:
    try:
        return getattr(value, field)
    except AttributeError as error:
        raise UnstorableState(
            "a field without a value", where=keypath.show((*path, field)), seen=type(value).__qualname__,
            todo="set it before the snapshot",
        ) from error  # fmt: skip


def _check_only_fields(value: Any, fields: tuple[str, ...], path: Path) -> None:
    """Anything else on the instance would be lost without a word."""
    held = [*vars(value)] if hasattr(value, "__dict__") else []
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        held += [slot for slot in ((slots,) if isinstance(slots, str) else slots) if hasattr(value, slot)]
    more = set(held) - {*fields, "__dict__", "__weakref__", _TYPE_ARGUMENTS}
    if more:
        raise UnstorableState(
            "a dataclass instance with attributes that are no fields", where=keypath.show((*path, min(more))),
            seen=f"{type(value).__qualname__} has {', '.join(sorted(more))}"[:200],
            todo="make them fields (a cached_property a property), or delete them before each snapshot",
        )  # fmt: skip


# --- reading ----------------------------------------------------------------------------------------


def decode_registered(tag: Mapping[str, Any], kind: str, decode: Callable[[Any], Any]) -> Any:
    """The instance a tag stands for, or an `Unbuilt`. Raises KeyError, TypeError, ValueError for what is no tag."""
    name = tag["class"]
    if type(name) is not str:
        raise TypeError("the name of a class is no string")
    cls = class_of(name)
    if kind == "enum":
        return _decode_enum(name, cls, _names(tag["members"]), decode(tag["value"]))
    fields, items = _names(tag["fields"]), tag["items"]
    if type(items) is not list or len(set(fields)) != len(items):
        raise ValueError("not one value for each field")
    return _decode_dataclass(
        name, cls, {field: decode(item) for field, item in zip(fields, items, strict=True)}
    )


def _names(value: Any) -> list[str]:
    if type(value) is not list or not all(type(name) is str for name in value):
        raise TypeError("not a list of names")
    return value


def _decode_dataclass(name: str, cls: type | None, values: dict[str, Any]) -> Any:
    if cls is None:
        return _not_registered(name, values)
    if issubclass(cls, enum.Enum):
        return Unbuilt(name, values, "is an enum today, a dataclass when it was saved", registered=True)
    today, saved = field_names(cls), list(values)
    added, removed = [f for f in today if f not in values], [f for f in saved if f not in today]
    if added or removed:
        changes = [f"added {', '.join(added)}"] * bool(added) + [f"removed {', '.join(removed)}"] * bool(
            removed
        )
        return Unbuilt(
            name, values, f"has other fields since it was saved: {'; '.join(changes)}", registered=True
        )
    return build(cls, values)


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance with these fields. Neither __init__ nor __post_init__ runs; frozen and slotted ones work too."""
    made: Any = object.__new__(cls)
    for field, value in values.items():
        object.__setattr__(made, field, value)
    return made


def _decode_enum(name: str, cls: type | None, members: list[str], value: Any) -> Any:
    content = {"members": members, "value": value}
    if cls is None:
        return _not_registered(name, content)
    if not issubclass(cls, enum.Enum):
        return Unbuilt(name, content, "is a dataclass today, an enum when it was saved", registered=True)
    member = _member(cls, members)
    if member is None:
        return Unbuilt(name, content, f"has no member {'|'.join(members)} today", registered=True)
    if not _same(member._value_, value):
        reason = f"{'|'.join(members)} is {member._value_!r} today, was {value!r} when it was saved"
        return Unbuilt(name, content, reason, registered=True)
    return member


def _member(cls: type[enum.Enum], names: list[str]) -> enum.Enum | None:
    """The member of this name; of a flag the union of those named."""
    found = [cls.__members__.get(name) for name in names]
    if issubclass(cls, enum.Flag):
        result = cls(0)
        for flag in found:
            if not isinstance(flag, cls):
                return None
            result |= flag
        return result
    return found[0] if len(found) == 1 else None


def _same(a: Any, b: Any) -> bool:
    """Equal plain data: repr tells 1 from 1.0 and True, 0.0 from -0.0, and NaN is itself."""
    return type(a) is type(b) and repr(a) == repr(b)


def _not_registered(name: str, content: dict[str, Any]) -> Unbuilt:
    return Unbuilt(
        name, content, "isn't registered in this process: ckptd.register_type(…)", registered=False
    )


# --- both sides -------------------------------------------------------------------------------------


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of an instance of a registered dataclass, by name; None for anything else."""
    cls = type(value)
    if name_of(cls) is None or issubclass(cls, enum.Enum):
        return None
    return {field: getattr(value, field) for field in field_names(cls)}


def unbuilt_in(value: Any, path: Path) -> Iterator[tuple[Path, Unbuilt]]:
    """Every Unbuilt at or below a loaded value, with its key path."""
    if isinstance(value, Unbuilt):
        yield path, value
        return
    for key, item in branches_below(value):
        yield from unbuilt_in(item, (*path, key))


def items_below(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container of a state holds, with its key, index or field; nothing for anything else."""
    if type(value) is dict or isinstance(value, Mapping):  # of an abstract class it takes ten times as long
        return value.items()
    if isinstance(value, (list, tuple, deque)):
        return enumerate(value)
    return (fields_of(value) or {}).items()


def branches_below(value: Any) -> Iterable[tuple[Any, Any]]:
    """As items_below, without plain scalars: there is nothing below them, and a history of them is long."""
    if isinstance(value, (list, tuple, deque)) and SCALARS.issuperset(map(type, value)):
        return ()
    return [(key, item) for key, item in items_below(value) if type(item) not in SCALARS]


def refuse_changed(components: Mapping[Any, Any], where: str) -> None:
    """Raise StateMismatch when a class that is registered here isn't the one that was saved."""
    changed = [(path, found) for path, found in unbuilt_in(components, ()) if found.registered]
    if changed:
        raise StateMismatch(
            "a registered class has changed since it was saved", where=where,
            seen="; ".join(f"{keypath.show(path)}: {found.class_name} {found.reason}" for path, found in changed[:5]),
            todo="load the other components with only=[…], or register the class as it was under that name",
        )  # fmt: skip
