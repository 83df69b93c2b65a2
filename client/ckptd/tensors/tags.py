# ruff: noqa: TID253
"""The one encoding of types that the weights_only loader refuses: a dict whose key "__ckptd__" says the kind.

A user's own dict with that key is spelled as a tagged list of items, so a tag can't be mistaken for data.
Decoding builds only the types named here, imports nothing and runs no code that the bytes name.

| kind | other keys |
|---|---|
| dict, odict | items; odict also metadata when there is one |
| defaultdict | factory (name of a builtin, or None), items |
| counter | items |
| namedtuple | module, name, fields, items |
| frozenset, deque | items; deque also maxlen |
| bytearray | data |
| ndarray | dtype (a name for numpy.dtype, mostly its str), shape, order ("C" or "F"), data (a uint8 tensor) |
| numpy-scalar | dtype, data (bytes) |
| torch-generator | device, state (bytes) |
| numpy-generator, numpy-random-state | bit_generator, state (a dict of plain values) |
| numpy-generator also | seed, where it is known: see `ckptd.tensors.seed_sequence` |
| python-random | state |
| range | start, stop, step |
| torch-function | name, one of FUNCTIONS |
| dataclass, enum | see `ckptd.tensors.registered_tags` |
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, Final, TypeAlias

import numpy
import torch
from torch.optim.swa_utils import SWALR

from ckptd.errors import UnstorableState
from ckptd.snapshot import keypath
from ckptd.snapshot.keypath import Path
from ckptd.tensors.generator_places import PLACES
from ckptd.tensors.namedtuples import could_be_made, is_all_fields
from ckptd.tensors.plain_keys import check_element, check_key
from ckptd.tensors.registered_tags import encode_registered
from ckptd.tensors.rng import plain_numpy
from ckptd.tensors.seed_sequence import seed_to_plain

MARKER: Final = "__ckptd__"

#: Stores one value below the tagged one and returns its plain form.
Walk: TypeAlias = Callable[[Any, Path], Any]

FACTORIES: Final[dict[str, type]] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, str, bytes, bool, tuple)
}

#: What torch puts into a state itself: up to 2.6 at least, SWALR.state_dict() holds the one of these that it anneals by.
FUNCTIONS: Final[dict[str, Any]] = {
    f"SWALR.{name}": vars(SWALR)[name].__func__
    for name in ("_cosine_anneal", "_linear_anneal")
    if name in vars(SWALR)
}


def encode(value: Any, path: Path, walk: Walk | None = None) -> dict[str, Any] | None:
    """The tagged dict for value, or None when its type has no tag.

    Args:
        value: Any object.
        path: Its key path, for errors.
        walk: Encodes what lies below it; by default this function does, and keeps plain values.

    Raises:
        UnstorableState: The type has a tag, but this value isn't exactly that (an array of objects, …).
    """
    encoder = _ENCODERS.get(type(value))
    walk = walk or _walk_plain
    if encoder is not None:
        return encoder(value, path, walk)
    if isinstance(value, numpy.generic) and type(value) is value.dtype.type:
        return _encode_scalar(value, path)
    if isinstance(value, tuple) and is_namedtuple(type(value)) and is_all_fields(value):
        return _encode_namedtuple(value, path, walk)
    registered = encode_registered(value, path, walk)
    return None if registered is None else {MARKER: registered[0], **registered[1]}


def _walk_plain(value: Any, path: Path) -> Any:
    tagged = encode(value, path)
    return value if tagged is None else tagged


def encode_dict(value: dict[Any, Any], path: Path, walk: Walk) -> dict[str, Any]:
    """The tagged form of a dict or OrderedDict that holds the marker as a key."""
    if type(value) is dict:
        return {MARKER: "dict", "items": _items(value, path, walk)}
    tagged = {MARKER: "odict", "items": _items(value, path, walk)}
    if hasattr(value, "_metadata"):
        tagged["metadata"] = walk(value._metadata, (*path, "_metadata"))
    return tagged


def _items(value: Mapping[Any, Any], path: Path, walk: Walk) -> list[list[Any]]:
    return [[check_key(key, path), walk(item, (*path, key))] for key, item in value.items()]


def _sequence(value: Iterable[Any], path: Path, walk: Walk) -> list[Any]:
    return [walk(item, (*path, index)) for index, item in enumerate(value)]


def type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_namedtuple(kind: type) -> bool:
    """Whether kind is what collections.namedtuple makes, without additions that a tag couldn't hold."""
    return (
        kind.__bases__ == (tuple,)
        and type(kind.__module__) is str
        and could_be_made(kind.__qualname__, getattr(kind, "_fields", None))
    )


# --- encoders -------------------------------------------------------------------------------------


def _encode_namedtuple(value: Any, path: Path, walk: Walk) -> dict[str, Any]:
    kind = type(value)
    return {
        MARKER: "namedtuple",
        "module": kind.__module__,
        "name": kind.__qualname__,
        "fields": list(kind._fields),
        "items": _sequence(tuple.__iter__(value), path, walk),
    }


def _encode_defaultdict(value: defaultdict[Any, Any], path: Path, walk: Walk) -> dict[str, Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and FACTORIES.get(str(name)) is not factory:
        raise UnstorableState(
            "a defaultdict whose factory can't be stored",
            where=keypath.show(path),
            seen=repr(factory)[:80],
            wanted=f"None or one of {', '.join(FACTORIES)}",
            todo="store dict(value)",
        )
    return {MARKER: "defaultdict", "factory": name, "items": _items(value, path, walk)}


def _encode_counter(value: Counter[Any], path: Path, walk: Walk) -> dict[str, Any]:
    _check_no_more(value, frozenset(), path)
    return {MARKER: "counter", "items": _items(value, path, walk)}


def _encode_frozenset(value: frozenset[Any], path: Path, walk: Walk) -> dict[str, Any]:
    elements = [check_element(item, path) for item in value]
    return {MARKER: "frozenset", "items": sorted(elements, key=repr)}


def _check_no_more(value: Any, known: frozenset[str], path: Path) -> None:
    """Attributes that someone set would be lost without a word."""
    more = sorted(set(vars(value)) - known)
    if more:
        raise UnstorableState(
            f"a {type(value).__name__} with attributes", where=keypath.show(path), seen=", ".join(more)[:200],
            todo="store them beside it, and delete them before the snapshot",
        )  # fmt: skip


def _encode_deque(value: deque[Any], path: Path, walk: Walk) -> dict[str, Any]:
    return {MARKER: "deque", "maxlen": value.maxlen, "items": _sequence(value, path, walk)}


def _encode_bytearray(value: bytearray, path: Path, walk: Walk) -> dict[str, Any]:
    return {MARKER: "bytearray", "data": bytes(value)}


def _encode_array(value: numpy.ndarray, path: Path, walk: Walk) -> dict[str, Any]:
    _check_dtype(value, path)
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    flat = numpy.ascontiguousarray(value.T if order == "F" else value).reshape(-1)
    if not flat.flags.writeable:
        flat = flat.copy()  # torch takes no read-only memory without a warning
    data = (
        torch.from_numpy(flat.view(numpy.uint8))
        if flat.nbytes
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return {
        MARKER: "ndarray",
        "dtype": _dtype_name(value.dtype),
        "shape": list(value.shape),
        "order": order,
        "data": walk(data, path),
    }


def _encode_scalar(value: numpy.generic, path: Path) -> dict[str, Any]:
    _check_dtype(value, path)
    return {
        MARKER: "numpy-scalar",
        "dtype": _dtype_name(value.dtype),
        "data": value.tobytes()[: value.dtype.itemsize],
    }


def _dtype_name(dtype: numpy.dtype[Any]) -> str:
    """dtype.str, or where that names another class of the same bits (longlong and int64) one that tells them apart."""
    return dtype.str if numpy.dtype(dtype.str).type is dtype.type else dtype.byteorder + dtype.char


def _is_named(value: Any) -> bool:
    """Whether its dtype's name leads back to it. No array of no bytes an item can be made by one, scalars can."""
    if isinstance(value, numpy.ndarray) and not value.dtype.itemsize:
        return False
    try:
        return bool(numpy.dtype(_dtype_name(value.dtype)) == value.dtype)
    except TypeError:  # of an extension, which gives a name that NumPy doesn't know
        return False


def _check_dtype(value: Any, path: Path) -> None:
    dtype = value.dtype
    if dtype.hasobject or dtype.kind not in "biufcSUmM" or dtype.metadata or not _is_named(value):
        raise UnstorableState(
            "a NumPy dtype that can't be stored",
            where=keypath.show(path),
            seen=str(dtype)[:80],
            wanted="numbers, booleans, times, or strings of fixed length",
            todo="store a list, or one array per field",
        )


def _encode_torch_generator(value: torch.Generator, path: Path, walk: Walk) -> dict[str, Any]:
    return {
        MARKER: "torch-generator",
        "device": str(value.device),
        "state": value.get_state().numpy().tobytes(),
    }


def _encode_numpy_generator(value: Any, path: Path, walk: Walk) -> dict[str, Any]:
    if isinstance(value, numpy.random.Generator):
        kind, state = "numpy-generator", value.bit_generator.state
    else:
        kind, state = "numpy-random-state", value.get_state(legacy=False)
    if state["bit_generator"] not in PLACES:
        raise UnstorableState(
            "a NumPy generator that can't be stored",
            where=keypath.show(path),
            seen=str(state["bit_generator"])[:80],
            wanted=f"one of {', '.join(PLACES)}",
        )
    tagged = {MARKER: kind, "bit_generator": state["bit_generator"], "state": plain_numpy(state)}
    seed = seed_to_plain(value.bit_generator) if isinstance(value, numpy.random.Generator) else None
    return tagged if seed is None else {**tagged, "seed": seed}


def _encode_python_random(value: random.Random, path: Path, walk: Walk) -> dict[str, Any]:
    _check_no_more(value, frozenset({"gauss_next"}), path)
    return {MARKER: "python-random", "state": value.getstate()}


def _encode_function(value: FunctionType, path: Path, walk: Walk) -> dict[str, Any] | None:
    name = next((name for name, function in FUNCTIONS.items() if function is value), None)
    return None if name is None else {MARKER: "torch-function", "name": name}


def _encode_range(value: range, path: Path, walk: Walk) -> dict[str, Any]:
    return {MARKER: "range", "start": value.start, "stop": value.stop, "step": value.step}


_ENCODERS: Final[dict[type, Callable[[Any, Path, Walk], dict[str, Any] | None]]] = {
    defaultdict: _encode_defaultdict,
    Counter: _encode_counter,
    frozenset: _encode_frozenset,
    deque: _encode_deque,
    bytearray: _encode_bytearray,
    numpy.ndarray: _encode_array,
    torch.Generator: _encode_torch_generator,
    numpy.random.Generator: _encode_numpy_generator,
    numpy.random.RandomState: _encode_numpy_generator,
    random.Random: _encode_python_random,
    range: _encode_range,
    FunctionType: _encode_function,
}
