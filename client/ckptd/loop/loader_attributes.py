# ruff: noqa: TID253
"""What the objects around a DataLoader hold: a bounded walk over dataset, samplers, collate_fn and what is in them.

The walk goes through attributes (also slots), lists, tuples and dicts, closures, partials and bound methods; not
into tensors, arrays, models, optimizers, classes, files, loggers and the like, nor into large lists of samples: their
insides are no part of how a sample is made.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from ckptd.loop.loader_rng import is_generator
from ckptd.snapshot.values import SCALARS

MAX_HOLDERS: Final = 2048
MAX_ITEMS: Final = 64
_MAX_MACHINES: Final = 4096
MAX_TEXT: Final = 4096
_NOTHING: Final[Mapping[Any, Any]] = {}
_NUMBERS: Final = frozenset({bool, int, float})
_LIBRARIES: Final = frozenset({"numpy", "torch", "torchdata", "torchvision", "torchaudio", "ckptd"})
_NAMES_OF_CLASSES: Final = frozenset({"_is_protocol", "_is_runtime_protocol"})
_NO_VALUES: Final = (type, types.ModuleType, types.GenericAlias)
_SYSTEM: Final = frozenset({"fd", "fileno", "handle", "pid"})
SIZED: Final = (list, tuple, dict, set, frozenset, collections.deque, bytearray)
#: Top-level packages whose objects are handles or caches, not state of a sample.
_OPAQUE: Final = frozenset(
    {
        "_io", "_thread", "asyncio", "ckptd", "concurrent", "datetime", "decimal", "h5py", "io", "lmdb", "logging",
        "multiprocessing", "pandas", "pathlib", "PIL", "pyarrow", "re", "socket", "sqlite3", "subprocess",
        "tarfile", "threading", "weakref", "zipfile",
    }
)  # fmt: skip

_TRAINING: Final = ("torch.optim", "torch.amp", "torch.cuda", "torch.distributed")


@dataclass(eq=False)
class Holder:
    """Something with named values: an object, a small container, the cells of a closure.

    Attributes:
        path: Where it was found, as in `dataset.transform`.
        of: The thing itself.
        baseline: Its plain attributes when the walk found it.
    """

    path: str
    of: Any
    baseline: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of = self.of
        self._sized = isinstance(of, SIZED)
        self._function = isinstance(of, types.FunctionType)
        self._odd = isinstance(of, (type, types.MethodType, types.BuiltinMethodType))
        self._slots = () if self._sized or self._function or self._odd else _slots(type(of))

    def items(self) -> list[tuple[Any, Any]]:
        of = self.of
        if self._sized:
            if len(of) > _MAX_MACHINES:
                return []
            return list(of.items() if isinstance(of, dict) else enumerate(of))
        if self._function:
            return [*_cells(of), *_defaults(of)]
        if self._odd:
            return _class_attributes(of) if isinstance(of, type) else [("__self__", of.__self__)]
        found = list(getattr(of, "__dict__", _NOTHING).items())
        found += [(slot, getattr(of, slot)) for slot in self._slots if hasattr(of, slot)]
        return found

    def is_long(self) -> bool:
        """Whether it is a container of more than a look after each batch should cost."""
        return self._sized and len(self.of) > MAX_ITEMS

    def now(self) -> Mapping[Any, Any]:
        """What the names hold."""
        if self._sized or self._function or self._slots or self._odd:
            return dict(self.items())
        return getattr(self.of, "__dict__", _NOTHING)

    def get(self, name: Any) -> Any:
        """What name holds; None if there is no such name."""
        inside = self.of if isinstance(self.of, dict) else getattr(self.of, "__dict__", _NOTHING)
        if name in inside and not (self._function or self._odd):
            return inside[name]
        return dict(self.items()).get(name)

    def set(self, name: Any, value: Any) -> None:
        of = self.of
        if isinstance(of, (dict, list, collections.deque)):
            of[name] = value
        elif isinstance(of, type):
            setattr(of, name, value)
        elif self._function:
            cells = dict(zip(of.__code__.co_freevars, of.__closure__ or (), strict=True))
            cells[name].cell_contents = value
        elif name in self._slots or not hasattr(of, "__dict__"):
            object.__setattr__(of, name, value)
        else:
            vars(of)[name] = value

    def is_settable(self) -> bool:
        """Whether what it holds can be set."""
        return isinstance(self.of, type) or not (
            self._odd or isinstance(self.of, (tuple, set, frozenset, bytearray))
        )

    def takes(self, name: str) -> bool:
        """Whether an attribute of that name can be made in it."""
        made = self._is_open() and _is_name(name) and _is_free(type(self.of), name)
        return made or name in self._slots

    def makes(self, name: str) -> bool:
        """Whether an attribute of that name may be made at its first use; a cell, or one of a class, too."""
        if self._function:
            return name in dict(self.items())
        if isinstance(self.of, type):
            return _is_name(name) and not callable(getattr(self.of, name, None))
        return self.takes(name)

    def drop(self, name: Any) -> None:
        """Delete an attribute, if it has it."""
        if name in self._slots and hasattr(self.of, name):
            object.__delattr__(self.of, name)
        elif self._is_open():
            vars(self.of).pop(name, None)

    def _is_open(self) -> bool:
        return not (self._sized or self._function or self._odd) and hasattr(self.of, "__dict__")

    def at(self, name: Any) -> str:
        if not self.path:
            return str(name)
        return f"{self.path}[{name!r}]" if self._sized else f"{self.path}.{name}"


def walk(roots: dict[str, Any]) -> tuple[list[Holder], bool]:
    """Every holder reached from roots, the nearest first, and whether all were reached."""
    holders = [Holder("", roots)]
    parents = [0]
    seen: set[int] = set()
    for number, holder in enumerate(holders):  # it grows meanwhile
        for name, value in holder.items():
            path = holder.at(name)
            for found in _below(path, value):
                if id(found.of) not in seen:
                    seen.add(id(found.of))
                    holders.append(found)
                    parents.append(number)
        if len(holders) > MAX_HOLDERS or (holder._sized and len(holder.of) > _MAX_MACHINES):
            return holders[:MAX_HOLDERS], False
    holders = _without_data(holders, parents)
    for holder in holders:
        if not (holder._sized or holder._odd):
            holder.baseline = {name: value for name, value in holder.items() if type(value) in SCALARS}
    return holders, True


def _without_data(holders: list[Holder], parents: list[int]) -> list[Holder]:
    """Without containers that lead to nothing but data: they are looked at after each batch for nothing."""
    kept = [not holder._sized for holder in holders]
    for number in reversed(range(1, len(holders))):
        if not kept[number]:
            kept[number] = any(is_generator(value) for _, value in holders[number].items())
        kept[parents[number]] |= kept[number]
    return [holder for holder, keep in zip(holders, kept, strict=True) if keep or not holder.path]


def _below(path: str, value: Any) -> Iterator[Holder]:
    kind = type(value)
    if kind in SCALARS or is_generator(value) or isinstance(value, (type, types.ModuleType)):
        return
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        if is_generator(value.__self__):  # random.Random(1).uniform
            yield Holder(path, value)
        else:
            yield from _below(path, value.__self__)
    elif isinstance(value, functools.partial):
        for part, inner in ((".func", value.func), (".args", value.args), (".keywords", value.keywords)):
            yield from _below(path + part, inner)
    elif isinstance(value, types.FunctionType):
        if value.__closure__ or any(type(default) not in SCALARS for _, default in _defaults(value)):
            yield Holder(path, value)
    elif isinstance(value, SIZED):
        if isinstance(value, (list, tuple, dict, collections.deque)) and _is_looked_into(value):
            yield Holder(path, value)
    elif _has_insides(value) and (hasattr(value, "__dict__") or _slots(kind)):
        yield Holder(path, value)
        for cls in kind.__mro__:
            if _is_the_users(cls) and _class_attributes(cls):
                yield Holder(f"{path}.{cls.__qualname__}", cls)


def _is_looked_into(container: list[Any] | tuple[Any, ...] | dict[Any, Any] | collections.deque[Any]) -> bool:
    """A small one of objects; a large one if it is of things that make samples, not of samples."""
    values = container.values() if isinstance(container, dict) else container
    if len(container) <= MAX_ITEMS:
        return not all(type(value) in SCALARS for value in values)
    first = next(iter(values))
    if type(first) in SCALARS or isinstance(first, (*SIZED, torch.Tensor, np.ndarray, type)):
        return False
    return (
        is_generator(first) or callable(first) or hasattr(first, "__getitem__") or hasattr(first, "__iter__")
    )


def _has_insides(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray, torch.device, torch.utils.data.DataLoader)):
        return False
    if isinstance(value, torch.nn.Module):
        return next(value.parameters(), None) is None  # a transform; one with parameters is a model
    module = type(value).__module__
    return module.partition(".")[0] not in _OPAQUE and not module.startswith(_TRAINING)


@functools.lru_cache(1024)
def _is_the_users(cls: type) -> bool:
    top = cls.__module__.partition(".")[0]
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


def _class_attributes(cls: type) -> list[tuple[str, Any]]:
    """What objects of a class share: generators, counters, objects; no methods."""
    return [
        (name, value) for name, value in vars(cls).items()
        if not name.startswith(("__", "_abc_")) and name not in _NAMES_OF_CLASSES
        if not isinstance(value, _NO_VALUES) and not hasattr(type(value), "__get__")
    ]  # fmt: skip


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(
        code.co_varnames[: code.co_argcount][-len(defaults) or code.co_argcount :], defaults, strict=True
    )
    yield from (function.__kwdefaults__ or _NOTHING).items()


def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for cls in kind.__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _is_name(name: str) -> bool:
    return name.isidentifier() and name[:2] != "__"


def _is_free(kind: type, name: str) -> bool:
    """Whether objects of that class may have an attribute of that name, which is no method, slot or property."""
    own = getattr(kind, name, None)
    return not callable(own) and not hasattr(type(own), "__set__")


def is_of_the_system(name: Any) -> bool:
    """Whether it is a number of the system, by its name: a file descriptor, a process."""
    return str(name).lower().lstrip("_").rpartition("_")[2] in _SYSTEM


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same plain one: of one kind and sign too."""
    if one is other or type(one) is not type(other) or one != other:
        return one is other
    return type(one) not in (float, complex) or repr(one) == repr(other)


def recordable(name: Any, baseline: Any, value: Any) -> bool:
    """Whether value is a plain one that may be stored and put back: of the type the attribute had at first, or None.

    A number of the system that was None isn't: it is no state.
    """
    kind, before = type(value), type(baseline)
    if kind not in SCALARS or (kind in (str, bytes) and len(value) > MAX_TEXT):
        return False
    if baseline is None or value is None:
        return not is_of_the_system(name)
    return kind is before or (kind in _NUMBERS and before in _NUMBERS)
