"""For tests: hypothesis strategies of every value a state may hold, and the same structure with other contents."""

from __future__ import annotations

import copy
import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import ckptd
from ckptd.format.storage_types import STORAGE_TYPES

Pair = namedtuple("Pair", "first second")
Renamed = namedtuple("Renamed", ["a", "class"], rename=True)


@ckptd.register_type(name="any_state.Data")
@dataclass
class Data:
    left: Any
    right: Any = 0


@ckptd.register_type(name="any_state.Frozen")
@dataclass(frozen=True, slots=True)
class Frozen:
    only: Any


@ckptd.register_type(name="any_state.Way")
class Way(enum.Enum):
    IN = "in"
    OUT = (1, "out")


@ckptd.register_type(name="any_state.Bits")
class Bits(enum.IntFlag):
    A = 1
    B = 2


@ckptd.register_type(name="any_state.Mask")
class Mask(enum.Flag):
    LOW = 3
    MIDDLE = 6
    HIGH = 8
    ALSO_HIGH = 8


SHARDINGS = [
    ckptd.Sharding(),
    *(ckptd.Sharding(by=by, shards=n) for by in ("size", "round-robin") for n in (1, 2, 3, 4)),  # type: ignore[arg-type]
    ckptd.Sharding(by="param-group", shards=3),
]

DTYPES = [
    dtype for dtype in (getattr(torch, name, None) for name in sorted(STORAGE_TYPES)) if dtype is not None
]

text = st.text(max_size=8) | st.sampled_from(
    [
        "__ckptd__",
        "tensor",
        "items",
        "file",
        "key",
        "class",
        "fields",
        "[",
        "rng",
        "a.weight",
        "b.bias",
        "\ud800",
    ]
)
keys = st.recursive(
    text | st.integers() | st.booleans() | st.floats() | st.none() | st.binary(max_size=4),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary(max_size=9)
)


# --- tensors ----------------------------------------------------------------------------------------


def memory(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """60 elements of any bits the dtype has."""
    raw = np.random.default_rng(seed).integers(0, 256, 60 * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw % 2 if dtype is torch.bool else raw).view(dtype)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda t: t,
    "offset": lambda t: t[7:20],
    "strided": lambda t: t[1::4],
    "matrix": lambda t: t.view(6, 10),
    "transposed": lambda t: t.view(6, 10).t(),
    "columns": lambda t: t.view(6, 10)[:, 2:5],
    "channels last": lambda t: t[:48].view(1, 4, 4, 3).permute(0, 3, 1, 2),
    "expanded": lambda t: t[:3].expand(4, 3),
    "windows": lambda t: t.as_strided((5, 4), (2, 1)),
    "0-dim": lambda t: t[5],
    "empty": lambda t: t[:0].view(2, 0),
    "ones": lambda t: t[:4].view(1, 4, 1),
    "conj": lambda t: t.conj(),
    "negative": lambda t: t.conj().imag if t.dtype in (torch.complex64, torch.complex128) else t,
}
HOW = ("plain", "plain", "parameter", "frozen", "grad", "shared")


@st.composite
def pools(draw: Any) -> list[torch.Tensor]:
    """A few tensors that overlap and repeat: what a state's tensors are taken from."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        base = memory(draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))
        for _ in range(draw(st.integers(1, 3))):
            found.append(_as(draw(st.sampled_from(HOW)), VIEWS[draw(st.sampled_from(sorted(VIEWS)))](base)))
    return found


def _as(how: str, tensor: torch.Tensor) -> torch.Tensor:
    trains = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if how == "parameter":
        return nn.Parameter(tensor, requires_grad=trains)
    if how == "frozen":
        return nn.Parameter(tensor, requires_grad=False)
    if how == "grad" and trains:
        return tensor.detach().requires_grad_()
    # A conjugate view of bcomplex32 is nothing that torch 2.15 can copy.
    if how == "shared" and str(tensor.dtype) != "torch.bcomplex32":
        return tensor.clone().share_memory_()
    return tensor


# --- everything else --------------------------------------------------------------------------------

arrays = st.builds(
    lambda dtype, shape, seed, order: _array(dtype, shape, seed, order),
    st.sampled_from(["f8", ">i4", "u1", "?", "c16", "U3", "S2", "f2", "q", "M8[s]", "m8[25us]", "g"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
    st.sampled_from("CFR"),
)


def _array(dtype: str, shape: list[int], seed: int, order: str) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 100, shape)
    array = values.astype(dtype, order="F" if order == "F" else "C")
    return array[::-1] if order == "R" and array.ndim else array


@dataclass(frozen=True)
class At:
    """Stands for a tensor of the pool: a strategy made anew around each pool is slow, and some tensors have no repr."""

    number: int


others = (
    arrays
    | st.builds(At, st.integers(0, 11))
    | st.builds(At, st.integers(0, 3))
    | st.builds(
        lambda code, n: np.dtype(code).type(n), st.sampled_from("?bBhHiIlLqQefdgFD"), st.integers(0, 1)
    )
    | st.sampled_from(
        [*Way, *Bits, Bits.A | Bits.B, Bits(0), *Mask, Mask.LOW | Mask.HIGH, Mask.LOW | Mask.MIDDLE, Mask(0)]
    )
    | st.builds(np.bytes_, st.binary(max_size=3) | st.sampled_from([b"", b"\0", b"a\0"]))
    | st.builds(np.str_, text | st.sampled_from(["", "\0", "a\0\0"]))
    | st.sampled_from(
        [np.array([], "U"), np.zeros(2, [("a", "S0")])["a"], np.datetime64("NaT"), Renamed(1, 2)]
    )
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.builds(bytearray, st.binary(max_size=5))
    | st.sampled_from(
        [torch.Size([1, 2]), torch.Size([]), torch.device("cpu"), torch.device("cuda:3"), *DTYPES]
    )
    | st.builds(lambda seed: torch.Generator().manual_seed(seed), st.integers(0, 99))
    | st.builds(np.random.default_rng, st.integers(0, 99))
    | st.builds(lambda seed: np.random.Generator(np.random.MT19937(seed)), st.integers(0, 99))
    | st.builds(np.random.RandomState, st.integers(0, 99))
    | st.builds(random.Random, st.integers(0, 99))
)
sets = st.sets(keys, max_size=4)


def containers(inner: Any) -> Any:
    lists = st.lists(inner, max_size=4)
    items = st.lists(st.tuples(keys, inner), max_size=4)
    return (
        lists
        | lists.map(tuple)
        | items.map(dict)
        | items.map(OrderedDict)
        | st.builds(_with_metadata, items, st.lists(st.tuples(keys, scalars | arrays), max_size=2))
        | st.builds(lambda pairs: {"__ckptd__": "dataclass", **dict(pairs)}, items)
        | st.builds(lambda kind, pairs: defaultdict(kind, pairs), st.sampled_from([list, int, None]), items)
        | st.builds(deque, lists, st.sampled_from([None, 2, 9]))
        | sets
        | sets.map(frozenset)
        | st.builds(Pair, inner, inner)
        | st.builds(Data, inner, inner)
        | st.builds(Frozen, inner)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.lists(st.floats(), min_size=64, max_size=70)
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=64, max_size=66)
    )


def _with_metadata(items: Any, metadata: Any) -> OrderedDict[Any, Any]:
    value: OrderedDict[Any, Any] = OrderedDict(items)
    value._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return value


names = (st.text(max_size=8) | st.sampled_from(["model", "optimizer", "a"])).filter(
    lambda name: name not in ("__ckptd__", "rng", "step", "schema", "wall_saved_at")
)


class Drawn:
    """A state. Hypothesis may print it, and not every tensor can be."""

    def __init__(self, state: dict[str, Any], pool: list[torch.Tensor]) -> None:
        self._placed, self._pool = state, pool
        self.state = rebuilt(
            state, lambda leaf: pool[leaf.number % len(pool)] if isinstance(leaf, At) else leaf
        )

    def __repr__(self) -> str:
        looks = [(type(t).__name__, t.dtype, t.shape, t.stride(), t.storage_offset()) for t in self._pool]
        return f"Drawn({self._placed!r}, {looks})"


values = st.recursive(scalars | others, containers, max_leaves=14)

#: States of nested values of every kind, with tensors from one pool, so that ties cross components.
states = st.builds(Drawn, st.dictionaries(names, values, min_size=1, max_size=4), pools())


# --- the same structure, other contents -------------------------------------------------------------


def rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same containers, made anew, around leaf(x) for every x in them."""
    if isinstance(value, dict):
        made = Counter() if type(value) is Counter else copy.copy(value)
        made.clear()
        made.update({key: rebuilt(item, leaf) for key, item in value.items()})
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata
        return made
    if isinstance(value, deque):
        return deque([rebuilt(item, leaf) for item in value], value.maxlen)
    if isinstance(value, Pair):
        return Pair(*(rebuilt(item, leaf) for item in value))
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(rebuilt(item, leaf) for item in value)
    if isinstance(value, (Data, Frozen)):
        return type(value)(*(rebuilt(getattr(value, one.name), leaf) for one in fields(value)))
    return leaf(value)


def otherwise(value: Any) -> Any:
    """A live state of the same structure and ties, in which every number, tensor, set and generator differs."""
    done: dict[Any, torch.Tensor] = {}
    return rebuilt(
        value, lambda leaf: _blank(leaf, done) if isinstance(leaf, torch.Tensor) else _other_leaf(leaf)
    )


def _other_leaf(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(12345)
    if isinstance(value, np.random.Generator):
        return np.random.Generator(type(value.bit_generator)(12345))
    if isinstance(value, (np.random.RandomState, random.Random)):
        return type(value)(12345)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if type(value) in (int, float):
        return type(value)(7)
    return type(value)() if type(value) in (set, frozenset, bytearray, str, bytes) else value


def _blank(value: torch.Tensor, done: dict[Any, torch.Tensor]) -> torch.Tensor:
    place = (*place_of(value), value.is_conj(), value.is_neg())
    if place not in done or not value.numel():
        zeros = torch.zeros((*value.shape, value.dtype.itemsize), dtype=torch.uint8)
        done[place] = zeros.view(value.dtype).reshape(value.shape)
    if isinstance(value, nn.Parameter):
        return nn.Parameter(done[place], requires_grad=value.requires_grad)
    return done[place].detach().requires_grad_(value.requires_grad and value.is_leaf)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where and how a tensor sees its memory: equal for tied ones."""
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def tensors_in(value: Any, *, deques: bool = True) -> list[torch.Tensor]:
    """Every tensor in a value, in the order of a walk; deques=False leaves out what lies in one."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        return tensors_in([dict(value), value._metadata], deques=deques)
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, (Data, Frozen)):
        value = [getattr(value, one.name) for one in fields(value)]
    inside = isinstance(value, (list, tuple)) or (deques and isinstance(value, deque))
    return [tensor for item in value for tensor in tensors_in(item, deques=deques)] if inside else []


def ties_in(value: Any, *, deques: bool = True) -> list[int]:
    """For every tensor with elements the number of the first one tied to it."""
    first: dict[Any, int] = {}
    return [
        first.setdefault((*place_of(tensor), tensor.is_conj(), tensor.is_neg()), number)
        for number, tensor in enumerate(tensors_in(value, deques=deques))
        if tensor.numel()
    ]
