# ruff: noqa: TID253
"""What a job reaches beside its state: the variables of its loop and the attributes of its objects.

Only to name suspects once a resumed run differs: whatever here has another value right after the restore than it
had at the snapshot is something the state doesn't bring back. A bounded walk that calls no code of the user's.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy
import torch
from torch.utils.data import DataLoader

from ckptd.loop.loader import ResumableLoader
from ckptd.proof.leaves import hash_of, plain_leaf
from ckptd.proof.trace import Leaf
from ckptd.tensors import tags
from ckptd.tensors.generator_state import GENERATORS, kind_of

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)
_NO_DATA: Final = (types.ModuleType, type, types.BuiltinFunctionType, BaseException, types.FrameType)
_LIBRARIES: Final = frozenset({"torch", "numpy", "ckptd"})
_OF_MODULE: Final = frozenset(vars(torch.nn.Module()))
_MAX_VALUES: Final = 5_000
_MAX_VISITS: Final = 50_000
_MAX_DEPTH: Final = 16
_MAX_ITEMS: Final = 200
_MAX_BYTES: Final = 64 * 1024 * 1024


def look_beside(state: Mapping[Any, Any], losses: Iterator[Any]) -> dict[str, Leaf]:
    """Name → value of what is reached from the state's objects and from the iterator, each object once."""
    walk = _Walk()
    for name, value in state.items():
        walk.visit(value, f"state[{name!r}]", 0)
    if isinstance(losses, types.GeneratorType):
        walk.visit(losses, "", 0)
    else:
        walk.visit(losses, "losses", 0)
    return walk.leaves


class _Walk:
    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._seen: dict[int, Any] = {}  # holds what it names, so that no id is used twice
        self._visits = 0

    def visit(self, value: Any, name: str, depth: int) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS or len(self.leaves) >= _MAX_VALUES or depth > _MAX_DEPTH:
            return
        if isinstance(value, _SCALARS):
            self.leaves.setdefault(name, plain_leaf(value))
            return
        if isinstance(value, _NO_DATA) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, (torch.Tensor, numpy.ndarray, *GENERATORS)):
            self._data(value, name)
        else:
            for inner, item in _parts(value, name):
                self.visit(item, inner, depth + 1)

    def _data(self, value: Any, name: str) -> None:
        if isinstance(value, GENERATORS):
            spelled = tags.encode(value, (name,))
            if spelled is not None:
                self.leaves[name] = Leaf(kind_of(value), plain_leaf(repr(spelled)).digest)
        elif isinstance(value, numpy.ndarray):
            if value.dtype.kind in "biufc" and value.nbytes <= _MAX_BYTES:
                text = f"ndarray {value.dtype.str}{list(value.shape)}"
                self.leaves[name] = Leaf(text, hash_of(torch.from_numpy(value.copy())))
        elif _is_plain(value) and value.nbytes <= _MAX_BYTES:
            text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            self.leaves[name] = Leaf(text, hash_of(value.resolve_conj().resolve_neg()))


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for index, (key, item) in enumerate(list(value.items())[:_MAX_ITEMS]):
            yield f"{name}[{key!r}]" if isinstance(key, _SCALARS) else f"{name}[{index}]", item
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(list(value)[-_MAX_ITEMS:], max(0, len(value) - _MAX_ITEMS)):
            yield f"{name}[{index}]", item
    elif isinstance(value, (set, frozenset)):
        yield f"sorted({name})", sorted(map(repr, value))
    elif isinstance(value, types.GeneratorType):
        yield from _of_generator(value, name)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, name)
    elif isinstance(value, types.MethodType):
        yield name, value.__self__
    elif isinstance(value, ResumableLoader):
        yield name, value._loader
    else:
        yield from _of_object(value, name)


def _of_generator(value: types.GeneratorType[Any, Any, Any], name: str) -> Iterator[tuple[str, Any]]:
    frame = value.gi_frame
    if frame is not None:
        for key, item in dict(frame.f_locals).items():
            yield _below(name, key), item
        yield from _globals_of(value.gi_code, frame.f_globals)
    if value.gi_yieldfrom is not None:
        yield name, value.gi_yieldfrom


def _of_function(value: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield key, cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from _globals_of(value.__code__, value.__globals__)


def _globals_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The global variables that the code names, but those of a library."""
    if str(names.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
        for key in code.co_names:
            if key in names:
                yield key, names[key]


def _of_object(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    # object.__getattribute__, so that no __getattr__ and no property of the user's runs.
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        return
    if isinstance(value, torch.nn.Module):
        for own in ("_parameters", "_buffers", "_modules"):
            for key, item in attributes.get(own, {}).items():
                yield _below(name, key), item
        attributes = {key: item for key, item in attributes.items() if key not in _OF_MODULE}
    of_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    for key, item in attributes.items():
        if of_library and (key.startswith("_") or callable(item)) and not isinstance(value, DataLoader):
            continue
        if of_library and key.startswith("_"):
            continue
        yield _below(name, key), item


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
