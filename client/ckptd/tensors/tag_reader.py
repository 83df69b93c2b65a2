# ruff: noqa: TID253
"""Reading the tags of `ckptd.tensors.tags`: only the types listed there are built, nothing is imported or run."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, Final

import numpy
import torch

from ckptd.errors import CorruptCheckpoint
from ckptd.tensors.generator_places import PLACES, check_numpy_place, check_torch_place
from ckptd.tensors.namedtuples import could_be_made
from ckptd.tensors.registered_tags import decode_registered
from ckptd.tensors.seed_sequence import seed_from_plain
from ckptd.tensors.tags import FACTORIES, FUNCTIONS, MARKER, is_namedtuple

_UTF_32: Final = {"<": "utf-32-le", ">": "utf-32-be"}


def decode(plain: Any) -> Any:
    """Replace every tagged dict below plain by what it stands for; plain containers are changed in place.

    Raises:
        CorruptCheckpoint: A tag of an unknown kind, or one that lacks what its kind needs.
    """
    kind = type(plain)
    if kind is dict or kind is OrderedDict:
        if MARKER in plain:
            return _decode_tag(plain)
        for key, item in plain.items():
            plain[key] = decode(item)
        if kind is OrderedDict and "_metadata" in vars(plain):
            plain._metadata = decode(plain._metadata)
    elif kind is list:
        plain[:] = map(decode, plain)
    elif kind is tuple:
        return tuple(map(decode, plain))
    return plain


def _decode_tag(tag: dict[str, Any]) -> Any:
    decoder = _DECODERS.get(tag[MARKER]) if isinstance(tag[MARKER], str) else None
    if decoder is None:
        raise CorruptCheckpoint(
            "a tag of an unknown kind", seen=repr(tag[MARKER])[:80], todo="read it with a newer ckptd"
        )
    try:
        return decoder(tag)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        if isinstance(error, CorruptCheckpoint):
            raise
        raise CorruptCheckpoint(
            f"a tag of kind {tag[MARKER]} that can't be read", seen=f"{type(error).__name__}: {error}"
        ) from error


def _pairs(tag: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(key, decode(item)) for key, item in tag["items"]]


def _decode_odict(tag: dict[str, Any]) -> OrderedDict[Any, Any]:
    result = OrderedDict(_pairs(tag))
    if "metadata" in tag:
        result._metadata = decode(tag["metadata"])  # type: ignore[attr-defined]
    return result


def _decode_defaultdict(tag: dict[str, Any]) -> defaultdict[Any, Any]:
    factory = None if tag["factory"] is None else FACTORIES[tag["factory"]]
    return defaultdict(factory, _pairs(tag))


def _decode_counter(tag: dict[str, Any]) -> Counter[Any]:
    return Counter(dict(_pairs(tag)))


def _decode_namedtuple(tag: dict[str, Any]) -> Any:
    fields, items = tuple(tag["fields"]), [decode(item) for item in tag["items"]]
    if len(fields) != len(items):
        raise ValueError(f"{len(fields)} fields, {len(items)} items")
    kind = _loaded_class(str(tag["module"]), str(tag["name"]), fields)
    return tuple.__new__(kind, items)


def _loaded_class(module: str, name: str, fields: tuple[str, ...]) -> Any:
    """The class if this process has it, else one that looks like it. Nothing is imported or run."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, type) or type(found) is type(sys) else None
    if isinstance(found, type) and is_namedtuple(found) and found._fields == fields:  # type: ignore[attr-defined]
        return found
    if not could_be_made(name, fields):
        raise ValueError(f"no namedtuple has the name {name!r} and the fields {fields}")
    return namedtuple(name.rpartition(".")[2], fields, module=module, rename=True)  # keeps these, e.g. _1


def _decode_array(tag: dict[str, Any]) -> numpy.ndarray:
    dtype = numpy.dtype(str(tag["dtype"]))
    if dtype.hasobject:
        raise ValueError("an array of objects")
    shape = tuple(int(size) for size in tag["shape"])
    data: numpy.ndarray = tag["data"].cpu().numpy().view(dtype)
    return data.reshape(shape[::-1]).T if tag["order"] == "F" else data.reshape(shape)


def _decode_scalar(tag: dict[str, Any]) -> Any:
    dtype = numpy.dtype(str(tag["dtype"]))
    if dtype.hasobject:
        raise ValueError("a scalar of objects")
    data = tag["data"] if dtype.itemsize else b""  # of an empty string NumPy gives the bytes of one NUL
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {dtype}")
    # As a string: an item of an array ends at its last character that isn't NUL.
    if dtype.kind == "S":
        return numpy.bytes_(data)
    if dtype.kind == "U":
        return numpy.str_(data.decode(_UTF_32[dtype.str[0]], "surrogatepass"))
    return numpy.frombuffer(data, dtype=dtype)[0]


def _decode_torch_generator(tag: dict[str, Any]) -> Any:
    device = torch.device(str(tag["device"]))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return GeneratorElsewhere(str(device), bytes(tag["state"]))
    generator, state = torch.Generator(device), bytearray(tag["state"])
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
    if device.type == "cpu":
        check_torch_place(state)
    return generator


class GeneratorElsewhere:
    """The state of a torch.Generator on a device that this host doesn't have."""

    def __init__(self, device: str, state: bytes) -> None:
        self.device, self.state = device, state

    def __repr__(self) -> str:
        return f"<GeneratorElsewhere device={self.device!r} {len(self.state)} bytes>"


def _decode_numpy_generator(tag: dict[str, Any]) -> Any:
    name = tag["bit_generator"]
    if name not in PLACES:
        raise ValueError(f"bit generator {name!r}")
    kind = getattr(numpy.random, name)
    check_numpy_place(tag["state"])
    if tag[MARKER] == "numpy-generator":
        bits = kind(seed_from_plain(tag.get("seed")))
        bits.state = tag["state"]
        return numpy.random.Generator(bits)
    state = numpy.random.RandomState(kind())
    state.set_state(tag["state"])
    return state


def _decode_python_random(tag: dict[str, Any]) -> random.Random:
    result = random.Random()
    version, internal, gauss = tag["state"]
    result.setstate((version, tuple(internal), gauss))
    return result


_DECODERS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "dict": lambda tag: dict(_pairs(tag)),
    "odict": _decode_odict,
    "defaultdict": _decode_defaultdict,
    "counter": _decode_counter,
    "namedtuple": _decode_namedtuple,
    "frozenset": lambda tag: frozenset(tag["items"]),
    "deque": lambda tag: deque(map(decode, tag["items"]), tag["maxlen"]),
    "bytearray": lambda tag: bytearray(tag["data"]),
    "ndarray": _decode_array,
    "numpy-scalar": _decode_scalar,
    "torch-generator": _decode_torch_generator,
    "numpy-generator": _decode_numpy_generator,
    "numpy-random-state": _decode_numpy_generator,
    "python-random": _decode_python_random,
    "range": lambda tag: range(tag["start"], tag["stop"], tag["step"]),
    "torch-function": lambda tag: FUNCTIONS[tag["name"]],
    "dataclass": lambda tag: decode_registered(tag, "dataclass", decode),
    "enum": lambda tag: decode_registered(tag, "enum", decode),
}
