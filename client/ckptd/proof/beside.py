# ruff: noqa: TID253
"""What a job reaches beside its state: the variables of its loop and the attributes of its objects.

Only to name suspects: whatever here has another value right after the restore than it had at the snapshot is
something the state doesn't bring back. A bounded walk that runs no code of the user's, nearest things first, and
each object once, under the name that a resumed run finds it by too.
"""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy
import torch
from torch.utils.data import DataLoader

from ckptd.errors import UnstorableState
from ckptd.loop.loader import ResumableLoader
from ckptd.loop.loader_memory import has_state_dict as gives_state
from ckptd.proof.leaves import hash_of, plain_leaf
from ckptd.proof.loaders import comes_late, loaders_of
from ckptd.proof.sources import sources_in
from ckptd.proof.trace import Leaf, is_scoped, scoped
from ckptd.tensors import tags
from ckptd.tensors.generator_state import GENERATORS, kind_of

Named: TypeAlias = tuple[str, Any]

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)
_NO_DATA: Final = (types.ModuleType, type, types.BuiltinFunctionType, BaseException, types.FrameType)
_LIBRARIES: Final = frozenset({"torch", "numpy", "ckptd", "builtins", "collections", "abc", "typing"})
_OF_MODULE: Final = frozenset(vars(torch.nn.Module()))
_RANGES: Final = (range, type(iter(range(0))))
_OF_LOADER: Final = (
    "epoch",
    "batch_in_epoch",
    "dataset",
    "sampler",
    "batch_sampler",
    "collate_fn",
    "generator",
)
_IN_WORKERS: Final = ("dataset", "collate_fn", "worker_init_fn")
_CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)
_MAX_VALUES: Final = 5_000
_MAX_OBJECTS: Final = 20_000
_MAX_ITEMS: Final = 200
_MAX_BYTES: Final = 64 * 1024 * 1024


def look_beside(state: Mapping[Any, Any], losses: Iterator[Any]) -> tuple[dict[str, Leaf], list[str]]:
    """What is reached from the state's objects and from the iterator, by name; see trace.scoped.

    Returns:
        Name → value; and the names of objects with `state_dict` that aren't in the state, outer ones first.
    """
    walk = _Walk(state)
    components = [(f"state[{name!r}]", value) for name, value in state.items()]
    if not isinstance(losses, types.GeneratorType):
        walk.visit([("losses", losses), *components])
        return walk.leaves, walk.with_state
    # What the loop makes comes last: it isn't there before its first step, and may be other names for the rest.
    walk.visit([*_given(losses), *components])
    walk.visit(_made(losses))
    return walk.leaves, walk.with_state


def look_around(
    state: Mapping[Any, Any], losses: Iterator[Any], job: Callable[[], Any]
) -> dict[str, list[str]]:
    """The names of what is reached, as for look_beside, and often is why a resumed run differs.

    `left_out`: ResumableLoaders that aren't in the state. `loaders`: DataLoaders that no ResumableLoader wraps.
    `in_workers`: generators of a module that the workers of one in the state draw from, each from a copy of its own.
    `ranges`: what the loop was given to count by. `sources`: functions, from make_job() on, that take numbers
    from where no seed reaches.
    """
    walk = _Walk(state)
    walk.visit([*_roots(losses), *((f"state[{name!r}]", value) for name, value in state.items())])
    known = {id(loader) for loader in loaders_of(state)}
    resumable = [(name, one) for name, one in walk.met if isinstance(one, ResumableLoader)]
    left_out = [name for name, one in resumable if id(one) not in known]
    wrapped = {id(one._loader) for _, one in resumable}
    loaders = [name for name, one in walk.met if isinstance(one, DataLoader) and id(one) not in wrapped]
    in_workers = _Walk({})
    for loader in loaders_of(state):
        if loader.num_workers:
            in_workers.visit([(key, getattr(loader, key, None)) for key in _IN_WORKERS])
    shared = [name for name, one in in_workers.met if isinstance(one, GENERATORS) and is_scoped(name)]
    given = _given(losses) if isinstance(losses, types.GeneratorType) else iter(())
    ranges = [name for name, value in given if isinstance(value, _RANGES)]
    sources = _Walk({})
    sources.visit([("", job), *_roots(losses), *(("", value) for value in state.values())])
    around = {"left_out": left_out, "loaders": loaders, "in_workers": shared, "ranges": ranges}
    return around | {"sources": list(sources.sources)}


def _roots(losses: Iterator[Any]) -> list[Named]:
    if isinstance(losses, types.GeneratorType):
        return [*_given(losses), *_made(losses)]
    return [("losses", losses)]


class _Walk:
    def __init__(self, state: Mapping[Any, Any]) -> None:
        self.leaves: dict[str, Leaf] = {}
        self.met: list[Named] = []  #: loaders and generators
        self.with_state: list[str] = []
        self.sources: dict[str, None] = {}  #: see sources.sources_in
        self._named = {id(value): f"state[{name!r}]" for name, value in state.items()}
        self._seen: dict[int, Any] = {id(state): state}  # holds what it names, so that no id is used twice
        self._late = {id(one) for loader in loaders_of(state) for one in comes_late(loader)}

    def visit(self, roots: Iterable[Named]) -> None:
        waiting = deque(roots)
        while waiting and len(self._seen) < _MAX_OBJECTS and len(self.leaves) < _MAX_VALUES:
            name, value = waiting.popleft()
            if isinstance(value, _SCALARS):
                self.leaves.setdefault(name, plain_leaf(value))
            elif not isinstance(value, _NO_DATA) and id(value) not in self._seen:
                self._seen[id(value)] = value
                name = self._named.get(id(value), name)
                if gives_state(value) and not name.startswith(
                    "state["
                ):  # a part of the state, or its business
                    self.with_state.append(name)
                if isinstance(value, (DataLoader, ResumableLoader, *GENERATORS)):
                    self.met.append((name, value))
                if isinstance(value, (torch.Tensor, numpy.ndarray, *GENERATORS)):
                    self._data(value, name)
                elif isinstance(value, itertools.count):  # its repr is where it is
                    self.leaves.setdefault(name, plain_leaf(repr(value)))
                elif isinstance(value, _CONTAINERS) and not value:
                    self.leaves.setdefault(name, Leaf(f"empty {type(value).__name__}"))
                else:
                    self._look_for_sources(value)
                    waiting.extend(_of_class(type(value)) if id(value) in self._late else _parts(value, name))

    def _look_for_sources(self, value: Any) -> None:
        if isinstance(value, types.GeneratorType) and value.gi_frame is not None:
            self.sources |= dict.fromkeys(sources_in(value.gi_code, value.gi_frame.f_globals))
        elif isinstance(value, types.FunctionType) and not _of_library(value):
            self.sources |= dict.fromkeys(sources_in(value.__code__, value.__globals__))

    def _data(self, value: Any, name: str) -> None:
        if isinstance(value, GENERATORS):
            try:
                spelled = tags.encode(value, (name,))
            except (
                UnstorableState
            ):  # one with attributes of its own: no file could hold it, so none compares it
                return
            if spelled is not None:
                self.leaves.setdefault(name, Leaf(kind_of(value), plain_leaf(repr(spelled)).digest))
        elif isinstance(value, numpy.ndarray):
            if value.dtype.kind in "biufc" and value.nbytes <= _MAX_BYTES:
                text = f"ndarray {value.dtype.str}{list(value.shape)}"
                self.leaves.setdefault(name, Leaf(text, hash_of(torch.from_numpy(value.copy()))))
        elif _is_plain(value) and value.nbytes <= _MAX_BYTES:
            plain = value.detach().resolve_conj().resolve_neg()
            self.leaves.setdefault(name, Leaf(_look(value), hash_of(plain)))


def _look(value: torch.Tensor) -> str:
    shown = repr(value.item()) if value.ndim == 0 else str(list(value.shape))
    return f"{str(value.dtype).removeprefix('torch.')} {shown}"


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"


def _parts(value: Any, name: str) -> Iterator[Named]:
    if isinstance(value, dict):
        for index, (key, item) in enumerate(list(value.items())[:_MAX_ITEMS]):
            yield f"{name}[{key!r}]" if isinstance(key, _SCALARS) else f"{name}[{index}]", item
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(list(value)[-_MAX_ITEMS:], max(0, len(value) - _MAX_ITEMS)):
            yield f"{name}[{index}]", item
    elif isinstance(value, (set, frozenset)):
        yield f"{name} in order", sorted(map(repr, value))
    elif isinstance(value, types.GeneratorType):
        yield from _given(value)
        yield from _made(value)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield name, value.__self__
    elif isinstance(value, ResumableLoader):
        for key in _OF_LOADER:
            yield f"{name}.{key}", getattr(value, key, None)
    else:
        yield from _of_object(value, name)


def _given(loop: types.GeneratorType[Any, Any, Any]) -> Iterator[Named]:
    """What a generator has before its first step: what it closes over, its arguments, the globals it names."""
    if loop.gi_frame is not None:
        values, code = dict(loop.gi_frame.f_locals), loop.gi_code
        for key in (*code.co_freevars, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
            if key in values:
                yield scoped(key, f"{code.co_name}()"), values[key]
        yield from _globals_of(code, loop.gi_frame.f_globals)


def _made(loop: types.GeneratorType[Any, Any, Any]) -> Iterator[Named]:
    """What it made since, and the generator that it stands in."""
    if loop.gi_frame is not None:
        known = {name for name, _ in _given(loop)}
        for key, item in dict(loop.gi_frame.f_locals).items():
            name = scoped(key, f"{loop.gi_code.co_name}()")
            if name not in known:
                yield name, item
    if loop.gi_yieldfrom is not None:
        yield scoped("the inner loop", f"{loop.gi_code.co_name}()"), loop.gi_yieldfrom


def _of_function(value: types.FunctionType) -> Iterator[Named]:
    if _of_library(value):
        return
    for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield scoped(key, f"{value.__code__.co_name}()"), cell.cell_contents
        except ValueError:  # not set yet
            continue
    yield from _globals_of(value.__code__, value.__globals__)


def _globals_of(code: types.CodeType, names: dict[str, Any]) -> Iterator[Named]:
    """The global variables that the code names, but those of a library."""
    module = str(names.get("__name__", ""))
    if module.partition(".")[0] not in _LIBRARIES:
        for key in code.co_names:
            if key in names:
                yield scoped(key, f"module {module}"), names[key]


def _of_object(value: Any, name: str) -> Iterator[Named]:
    # object.__getattribute__, so that no __getattr__ and no property of the user's runs.
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        attributes = {}
    attributes |= dict(_in_slots(value))
    if isinstance(value, torch.amp.GradScaler):
        for key, item in torch.amp.GradScaler.state_dict(value).items():
            yield f"{name}.{key}", item
        return
    if isinstance(value, torch.nn.Module):
        for own in ("_parameters", "_buffers", "_modules"):
            for key, item in attributes.get(own, {}).items():
                yield f"{name}.{key}", item
        attributes = {key: item for key, item in attributes.items() if key not in _OF_MODULE}
    internal = _of_library(type(value))
    for key, item in attributes.items():
        if not (internal and (key.startswith("_") or isinstance(item, types.FunctionType))):
            yield f"{name}.{key}", item
    yield from _of_class(type(value))


def _in_slots(value: Any) -> Iterator[Named]:
    """What lies in no __dict__; a functools.partial has what it holds in such places too."""
    for kind in type(value).__mro__:
        if not _of_library(kind):
            for key, slot in vars(kind).items():
                if isinstance(slot, types.MemberDescriptorType):
                    try:
                        yield key, slot.__get__(value)
                    except AttributeError:  # not set
                        continue


def _of_class(kind: type) -> Iterator[Named]:
    """What a class of the user's holds itself, and what its methods reach."""
    for one in kind.__mro__:
        if not _of_library(one):
            for key, item in list(vars(one).items()):
                if isinstance(item, types.FunctionType) or not (key.startswith("__") or callable(item)):
                    yield f"{scoped(one.__qualname__, f'module {one.__module__}')}.{key}", item


def _of_library(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _LIBRARIES
