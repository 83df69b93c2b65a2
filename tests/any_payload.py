"""Random payloads of everything an archive can spell, live, for torch.save and for our writer alike."""

from __future__ import annotations

import io
import math
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from ckptd.format.pickle_emit import DTYPE_NAMES
from ckptd.snapshot.values import PackedNumbers


def torch_saves(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True


#: From torch, not from a list: a dtype that a new torch has is in here, and must be written.
SAVED_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and torch_saves(value)},
    key=str,
)
DTYPE_VALUES = [getattr(torch, name) for name in sorted(DTYPE_NAMES) if hasattr(torch, name)]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- plain values ---------------------------------------------------------------------------------


@st.composite
def ints(draw: st.DrawFn) -> int:
    """Any width that a LONG1 has, each as likely as the next, and the edges of each."""
    bits = draw(st.integers(0, 2038))
    edge = draw(st.sampled_from([None, 0, -1]))
    magnitude = (1 << bits) + edge if edge is not None else draw(st.integers(0, (1 << bits) - 1))
    return draw(st.sampled_from([magnitude, ~magnitude]))


def as_double(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    return value


ODD_DOUBLES = [
    0x7FF8000000000001,
    0x7FF0000000000001,
    0xFFF8DEADBEEF0000,
    1 << 63,
    1,
    0x7FF << 52,
    0xFFF << 52,
]
FLOATS = st.one_of(
    st.floats(), st.sampled_from(ODD_DOUBLES).map(as_double), st.integers(0, 2**64 - 1).map(as_double)
)
COMPLEX = st.builds(complex, FLOATS, FLOATS)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
#: torch.save spells empty bytes in a way that weights_only refuses; ours are tested by themselves.
BYTES = st.binary(min_size=1, max_size=12)
SIZES = st.lists(st.integers(0, 2**62), max_size=5).map(torch.Size)
DEVICES = st.sampled_from(["cpu", "cuda", "cuda:0", "cuda:7", "meta", "mps:0"]).map(torch.device)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-300, 70_000), ints(), FLOATS, TEXT, BYTES)
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=4)
PACKED = st.one_of(
    st.lists(FLOATS, max_size=70).map(lambda xs: PackedNumbers("d", struct.pack(f"<{len(xs)}d", *xs))),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70).map(
        lambda xs: PackedNumbers("q", struct.pack(f"<{len(xs)}q", *xs))
    ),
)
LEAVES = st.one_of(
    SCALARS,
    COMPLEX,
    SIZES,
    DEVICES,
    st.sampled_from(DTYPE_VALUES),
    st.sets(KEYS | COMPLEX, max_size=4),
    PACKED,
)


# --- tensors --------------------------------------------------------------------------------------


@st.composite
def dense_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits of any dtype in any dense layout: C order, permuted, 0-dim, without elements, Parameters."""
    dtype = draw(st.sampled_from(SAVED_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    raw = draw(st.randoms(use_true_random=False)).randbytes(math.prod(shape) * dtype.itemsize)
    tensor = of_bytes(raw, dtype, shape).permute(order)
    required = differentiable(dtype) and draw(st.booleans())
    if draw(st.booleans()):
        return torch.nn.Parameter(tensor, requires_grad=required)
    return tensor.requires_grad_(required)


def of_bytes(raw: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone() if raw else torch.empty(0).byte()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32, that its operators aren't done
        return flat.view(dtype).reshape(tuple(shape))


def differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def other_looks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same memory in the same layout: itself, another object, a Parameter."""
    found = [tensor, tensor.detach(), torch.nn.Parameter(tensor.detach(), requires_grad=False)]
    return found[:2] if tensor.numel() == 0 else found


@dataclass(frozen=True)
class Slot:
    """Stands for one of the payload's tensors while the rest of it is drawn."""

    number: int


@dataclass(frozen=True)
class Payload:
    """A state by component; its repr works for dtypes that torch itself can't print."""

    state: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Payload {exact(unpacked(self.state))}>"


def with_metadata(items: list[Any], metadata: Any) -> OrderedDict[Any, Any]:
    result = OrderedDict(items)
    if metadata is not None:
        result._metadata = metadata  # type: ignore[attr-defined]
    return result


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(st.tuples(KEYS, inner), max_size=4).map(OrderedDict),
        st.builds(with_metadata, st.lists(st.tuples(TEXT, inner), max_size=3), inner),
    )


SLOTS = st.integers(0, 11).map(Slot)
TREES = st.recursive(LEAVES | SLOTS | SLOTS, containers, max_leaves=12)


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    """A state whose tensors come from a small pool, so that many are tied."""
    pool = [look for t in draw(st.lists(dense_tensors(), min_size=2, max_size=4)) for look in other_looks(t)]
    state = {"x": draw(TREES), "y": draw(st.lists(SLOTS, min_size=2, max_size=6)), "z": draw(TREES)}
    return Payload(filled(state | draw(st.dictionaries(TEXT, TREES, max_size=2)), pool))


def filled(value: Any, pool: list[torch.Tensor]) -> Any:
    """value with a tensor of the pool for each slot."""
    return changed(value, lambda leaf: pool[leaf.number % len(pool)] if type(leaf) is Slot else leaf)


@st.composite
def models(draw: st.DrawFn) -> Payload:
    """A state_dict, as plain dict."""
    pool = [look for t in draw(st.lists(dense_tensors(), min_size=1, max_size=5)) for look in other_looks(t)]
    names = TEXT.filter(lambda text: not text.startswith("["))
    return Payload(filled(draw(st.dictionaries(names, SLOTS, min_size=1, max_size=8)), pool))


def unpacked(value: Any) -> Any:
    """value as the loop had it: packed numbers are the list they came from."""
    return changed(value, _numbers)


def _numbers(leaf: Any) -> Any:
    if type(leaf) is not PackedNumbers:
        return leaf
    return list(struct.unpack(f"<{len(leaf.data) // 8}{leaf.typecode}", leaf.data))


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """value with every leaf changed; keys stay."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(changed(item, change) for item in value)
    if kind in (dict, OrderedDict):
        result = kind((key, changed(item, change)) for key, item in value.items())
        if hasattr(value, "_metadata"):
            result._metadata = changed(value._metadata, change)
        return result
    return change(value)


# --- equality -------------------------------------------------------------------------------------


def exact(value: Any, *, bits: bool = True) -> Any:
    """value as nested tuples that are equal only when types, order, layouts and every bit are."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return tensor_look(value, bits)
    if kind is float:
        return (kind, struct.pack("<d", value))
    if kind is complex:
        return (kind, struct.pack("<2d", value.real, value.imag))
    if kind in (dict, OrderedDict):
        items = [(exact(key), exact(item, bits=bits)) for key, item in value.items()]
        return (kind, items, exact(getattr(value, "_metadata", None), bits=bits))
    if kind in (list, tuple, torch.Size):
        return (kind, [exact(item, bits=bits) for item in value])
    if kind is set:
        return (kind, sorted(map(repr, map(exact, value))))
    return (kind, repr(value))


def tensor_look(tensor: torch.Tensor, bits: bool) -> Any:
    look = (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    if tensor.numel():  # torch gives a tensor without elements any strides it likes
        look += (strides(tensor),)
    return (*look, bits_of(tensor)) if bits and tensor.numel() else look


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of the dimensions that have more than one place; the others' mean nothing, and are given anew."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def bits_of(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    whole = torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor
    return bytes(whole.view(BITS[whole.itemsize]).contiguous().flatten().view(torch.uint8).numpy())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
        yield from tensors_in(getattr(value, "_metadata", None))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def ties(value: Any) -> list[int]:
    """Per tensor, in order, the first one that has its memory."""
    places = [tensor.data_ptr() if tensor.numel() else -at - 1 for at, tensor in enumerate(tensors_in(value))]
    return [places.index(place) for place in places]
