"""Field cases 27 to 30: what goes in comes out in value and type, or is refused by key path with what to do instead."""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import gc
import itertools
import json
import mmap
import operator
import types
import uuid
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptd
from ckptd.errors import UnstorableState
from ckptd.format import storage_types
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.capture import capture, copy_into
from ckptd.tensors.restoring import apply_state
from ckptd_places import places
from round_trip import LAYOUT_IDS, LAYOUTS, same, same_tensor, through_disk

__all__ = ["places"]

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


# --- every dtype of this torch (28) -----------------------------------------------------------------


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """128 elements that use every byte value: NaN payloads, infinities, subnormals, both zeros."""
    raw = torch.arange(128 * dtype.itemsize, dtype=torch.int64).mul(37).remainder(256).to(torch.uint8)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype)


def special(dtype: torch.dtype) -> torch.Tensor:
    """The values people ask about, where the dtype has them."""
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return patterns(dtype)[:3]
    info = torch.finfo(dtype)
    values = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, info.tiny / 4, info.max, info.min]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def views(dtype: torch.dtype) -> dict[str, Any]:
    """One tensor in every shape and layout that a state may hold it in."""
    base = patterns(dtype)
    made: dict[str, Any] = {
        "all": base,
        "special": special(dtype),
        "0-dim": base[3],
        "empty": base[:0],
        "empty dims": base[:0].view(0, 3, 0, 2),
        "offset": base[5:7],
        "transposed": base[:8].view(2, 4).t(),
        "strided": base[1:60:7],
        "channels last": base[:48].view(2, 2, 3, 4).permute(0, 3, 1, 2),
        "expanded": base[:3].expand(4, 3),
        "expanded 0-dim": base[2].expand(2, 2),
        "windows": base.as_strided((3, 3), (1, 1)),
        "long size-1 stride": base.as_strided((1, 3), (10**9, 1)),
        "tied": [base[8:16], base[8:16], base[8:16].view(2, 4)],
        "overlaps": [base[:6], base[3:9]],
        "parameter": nn.Parameter(base[:4], requires_grad=False),
        "shared memory": base[:5].clone().share_memory_(),
    }
    if dtype.is_complex:
        made |= {"conj": base[:6].conj(), "conj of a part": base[::5].conj()}
    if dtype in (torch.complex64, torch.complex128):
        made |= {"negative": base[:6].conj().imag, "real part": base[:6].real}
    if dtype.is_floating_point or dtype.is_complex:
        made |= {"needs grad": base[:4].clone().requires_grad_(), "trained": nn.Parameter(base[:4].clone())}
    return made


def zeroed(value: Any) -> Any:
    """The same structure with other memory, all zero bits."""
    if isinstance(value, list):
        return list(map(zeroed, value))
    zeros = (
        torch.zeros((*value.shape, value.dtype.itemsize), dtype=torch.uint8)
        .view(value.dtype)
        .reshape(value.shape)
    )
    if isinstance(value, nn.Parameter):
        return nn.Parameter(zeros, requires_grad=value.requires_grad)
    return zeros.requires_grad_(value.requires_grad)


def odd_tensor(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any dtype, also of those that no view leads to."""
    if not str(dtype).startswith(("torch.qu", "torch.qi")):
        return torch.empty(4, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantisation is deprecated
        return torch._empty_affine_quantized([8], scale=1.0, zero_point=0, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")
@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_this_torch_in_every_layout_works_or_is_refused(
    dtype: torch.dtype, sharding: Sharding, tmp_path: Path
) -> None:
    state: dict[str, Any] = {"t": {"one": odd_tensor(dtype)}}
    if str(dtype).removeprefix("torch.") in storage_types.STORAGE_TYPES:
        state = {"t": views(dtype)}
    if str(dtype).removeprefix("torch.") not in storage_types.STORAGE_TYPES:
        with pytest.raises(UnstorableState) as caught:
            capture(state)
        assert caught.value.where.startswith("state['t']") and caught.value.todo
        return
    loaded = through_disk(tmp_path, state, sharding)["t"]
    assert loaded.keys() == state["t"].keys()
    for name, value in state["t"].items():
        assert same(loaded[name], value), name
    first, second, third = loaded["tied"]
    assert first.data_ptr() == second.data_ptr() != third.data_ptr()
    live = {"t": {name: zeroed(value) for name, value in state["t"].items()}}
    apply_state(live, through_disk(tmp_path, state, sharding))
    for name, value in state["t"].items():
        assert same(live["t"][name], value), name


def test_only_dtypes_that_torch_cant_save_either_are_refused() -> None:
    refused = {str(d).removeprefix("torch.") for d in DTYPES} - storage_types.STORAGE_TYPES.keys()
    assert {name.lstrip("u") for name in refused} <= {
        *(f"int{bits}" for bits in range(1, 8)), "qint8", "qint32", "int4x2", "int2x4", "quint8", "quint4x2",
        "quint2x4",
    }  # fmt: skip


def test_a_dtype_that_a_newer_torch_brings_is_refused_and_never_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ckptd.tensors import tensor_rows, torch_support

    known = dict(storage_types.STORAGE_TYPES)
    del known["float8_e5m2"]
    monkeypatch.setattr(tensor_rows, "STORAGE_TYPES", known)
    tensor = torch.zeros(3, dtype=torch.uint8).view(torch.float8_e5m2)
    with pytest.raises(UnstorableState, match=r"state\['x'\]"):
        capture({"x": tensor})
    monkeypatch.undo()
    names = {dtype: name for dtype, name in torch_support.NAME_OF_DTYPE.items() if dtype is not torch.int16}
    monkeypatch.setattr(tensor_rows, "NAME_OF_DTYPE", names)  # one that isn't a name in the torch module
    with pytest.raises(UnstorableState, match=r"state\['x'\]"):
        capture({"x": torch.zeros(3, dtype=torch.int16)})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_as_a_value_comes_back_or_is_refused_before_anything_is_sent(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    try:
        captured = capture({"d": [dtype]}, rng=False)
    except UnstorableState as error:
        assert error.where == "state['d'][0]" and error.todo
        return
    assert captured.state["d"]
    assert through_disk(tmp_path, {"d": [dtype]})["d"] == [dtype]


# --- tensors: ties, memory, graphs (28, 29) ---------------------------------------------------------


def test_a_few_elements_of_a_large_storage_take_their_own_bytes(tmp_path: Path) -> None:
    large = torch.arange(1_000_000.0)
    state = {"v": [large[5:15], large.view(1000, 1000)[:, 3][:10], large[:20].view(torch.int32)[4:14]]}
    assert [row.nbytes for row in capture(state, rng=False).tensors] == [40, 40, 40]
    path = ckptd.save(tmp_path / "c", state, step=1, rng=False)
    assert sum(file.stat().st_size for file in path.iterdir()) < 20_000
    assert same(ckptd.load(path)["v"], state["v"])


@pytest.mark.parametrize(
    ("by", "shards"),
    [(by, n) for by in ("size", "round-robin") for n in (1, 2, 3, 4)]
    + [("param-group", 3), ("size", "auto")],
)
def test_ties_within_and_across_components_are_kept_in_every_sharding(
    by: Any, shards: Any, tmp_path: Path
) -> None:
    weight = nn.Parameter(torch.randn(40, 8))
    buffer = torch.randn(7, 5)
    state = {
        "model": {
            "embed.weight": weight,
            "head.weight": weight,
            "a.bias": buffer.t(),
            "b.bias": buffer.t(),
            "c": buffer,
        },
        "ema": {"w": weight.detach(), "c": buffer, "part": buffer[:2]},
        "other": [weight.detach()[3], weight.detach()[3]],
    }
    captured = capture(state, rng=False)
    assert captured.data_bytes < 1280 + 140 * 2 + 40 + 32 + 64 * 5
    loaded = through_disk(tmp_path, state, Sharding(by=by, shards=shards), rng=False)
    assert same(loaded, state)
    place = {
        name: {key: tensor.data_ptr() for key, tensor in loaded[name].items()} for name in ("model", "ema")
    }
    assert place["model"]["embed.weight"] == place["model"]["head.weight"]
    assert place["model"]["a.bias"] == place["model"]["b.bias"]
    assert loaded["other"][0].data_ptr() == loaded["other"][1].data_ptr()
    assert loaded["model"]["embed.weight"].requires_grad and not loaded["ema"]["w"].requires_grad


def test_tensors_that_start_alike_and_are_seen_otherwise_stay_apart(tmp_path: Path) -> None:
    square, row = torch.arange(9.0).view(3, 3), torch.arange(9.0)
    state = {"x": [square, square.t(), row[:3], row[::2][:3], row[:4], row.view(torch.int32), row, square[0]]}
    assert [one.alias_of for one in capture(state, rng=False).tensors] == [None] * 8
    for sharding in LAYOUTS:
        loaded = through_disk(tmp_path, state, sharding)["x"]
        assert same(loaded, state["x"])
        loaded[0].zero_()
        assert same(loaded[1:], state["x"][1:])


def test_shards_of_empty_tensors_only_come_back(tmp_path: Path) -> None:
    state = {
        "a": {
            "x": torch.empty(0, 3),
            "y": torch.empty(2, 0, dtype=torch.int8),
            "z": np.zeros((0, 2)),
            "full": np.array(85.0),
        },
        "b": torch.ones(1),
    }
    for sharding in (Sharding(shards=1), Sharding(shards=3), Sharding(by="round-robin", shards=4)):
        assert same(through_disk(tmp_path, state, sharding, rng=False), state)


def test_a_conjugate_view_that_torch_itself_cant_resolve_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.15 can't for bcomplex32."""

    def cannot(_: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("conj_cpu")

    base = torch.tensor([[1 + 2j, 3 - 4j, -0j], [complex("nan"), complex(1, -0.0), 1j]])
    state = {"x": [base, base.conj(), base.conj().t(), base[:, ::2].conj()]}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "resolve_conj", cannot)
        captured = capture(state)
        held = np.zeros(captured.data_bytes, np.uint8)
        copy_into(captured, held)
    assert base[0, 0] == 1 + 2j
    usual = capture(state)
    wanted = np.zeros(usual.data_bytes, np.uint8)
    copy_into(usual, wanted)
    assert captured.tensors == usual.tensors
    assert held.tobytes() == wanted.tobytes()


def test_ties_of_lazy_views_are_kept_and_lazy_and_plain_ones_stay_apart(tmp_path: Path) -> None:
    base = torch.complex(torch.arange(4.0), torch.ones(4))
    conj, part = base.conj(), base.conj().imag
    state = {"x": [base, conj, base.conj(), conj[:], part, part, base.imag]}
    captured = capture(state, rng=False)
    assert [row.alias_of for row in captured.tensors] == [None, None, 1, 1, None, 4, None]
    for sharding in LAYOUTS:
        assert same(through_disk(tmp_path, state, sharding)["x"], state["x"])


def test_the_memory_of_a_lazy_view_is_held_until_the_copy() -> None:
    """A state_dict() may make it anew: its address must not be given to another tensor meanwhile."""
    made = (
        {"v": [torch.full((1000,), complex(number, 1)).conj() for number in [step]]} for step in range(50)
    )
    captured = capture({"x": [Made(made) for _ in range(50)]}, rng=False)
    assert [row.alias_of for row in captured.tensors] == [None] * 50


class Made:
    def __init__(self, values: Iterator[Any]) -> None:
        self.values = values

    def state_dict(self) -> Any:
        return next(self.values)

    def load_state_dict(self, state: Any) -> None: ...


def test_a_tensor_whose_memory_was_freed_is_refused_instead_of_killing_the_process() -> None:
    gone = torch.ones(1000)
    part, column, late = gone[:10], gone.view(100, 10)[:, 0], gone[20:30]
    gone.untyped_storage().resize_(40)
    for tensor in (gone, column, late):
        with pytest.raises(UnstorableState, match=r"state\['x'\]\[0\].*no memory"):
            capture({"x": [tensor]})
    assert capture({"x": part}, rng=False).data_bytes == 40


def test_a_tensor_inside_vmap_is_refused_by_key_path() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnstorableState, match=r"state\['x'\]"):
            capture({"x": x})
        return x

    torch.func.vmap(inside)(torch.ones(3, 2))


def test_read_only_and_mapped_memory_is_stored_without_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(range(64)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when such a tensor is made
        read_only = torch.from_numpy(np.frombuffer(b"\x01\x02\x03", dtype=np.uint8))
        mapped = torch.from_numpy(np.memmap(file, mode="r", dtype="<f4"))
    shared = torch.from_file(str(file), shared=True, size=16, dtype=torch.int32)
    region = mmap.mmap(-1, 64)
    over_map = torch.from_numpy(np.frombuffer(region, dtype=np.int16))
    frozen = np.arange(3)
    frozen.flags.writeable = False
    state = {"t": [read_only, mapped, shared, over_map], "a": frozen}
    assert same(through_disk(tmp_path, state, rng=False), state)


def test_inference_tensors_and_modes_change_nothing(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"t": [torch.arange(3.0), torch.tensor([1 + 2j]).conj()]}
    assert same(through_disk(tmp_path, state, rng=False), state)
    with torch.inference_mode():
        capture(state)


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_torchs_default_device_and_dtype_change_nothing(sharding: Sharding, tmp_path: Path) -> None:
    def job() -> dict[str, Any]:
        return {
            "model": nn.Linear(2, 2, device="cpu", dtype=torch.float32), "g": torch.Generator("cpu"),
            "np": [np.zeros((0, 3)), np.arange(3), np.random.default_rng(1), np.float32(1)], "list": [1.5] * 100,
        }  # fmt: skip

    state, live = job(), job()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        loaded = through_disk(tmp_path, state, sharding)
        apply_state(live, loaded)
        assert torch.equal(live["model"].weight, state["model"].weight)
        assert same(live["np"][:2], state["np"][:2])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


class Big:
    """Something only a graph holds."""


def test_a_captured_state_keeps_no_graph_alive() -> None:
    held: list[weakref.ref[Big]] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.big = Big()
            held.append(weakref.ref(ctx.big))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
            return grad[0]

    y = Doubled.apply(torch.ones(4, requires_grad=True))
    tensors = [y, y[1:], y.view(2, 2).t(), torch.complex(y, y).conj()]
    captured = capture({"x": tensors, "h": Holder({"y": y})}, rng=False)
    del y, tensors
    gc.collect()
    assert held[0]() is None
    assert all(source.grad_fn is None and not source.requires_grad for source in captured.sources)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def test_buffers_parameters_and_their_metadata_come_back(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.running = nn.Buffer(torch.ones(2))
            self.hidden = nn.Buffer(torch.ones(2), persistent=False)
            self.norm = nn.BatchNorm1d(3)
            self.loose = nn.ParameterList([torch.ones(1)])
            self.named = nn.ParameterDict({"a": torch.ones(2)})

        def get_extra_state(self) -> Any:
            return {"seen": {1, 2}, "at": (1, "x")}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    net, live = Net(), Net()
    for sharding in LAYOUTS:
        loaded = through_disk(tmp_path, {"net": net}, sharding)
        assert same(loaded["net"], net.state_dict())
        assert loaded["net"]._metadata["norm"] == {"version": 2}
        assert "hidden" not in loaded["net"]
        apply_state({"net": live}, loaded)
        assert live.extra == {"seen": {1, 2}, "at": (1, "x")}


# --- plain data: keys, containers, numbers (27) -----------------------------------------------------

KEYS = {
    "a": {"b": 1}, "a.b": 2, "a/b": 3, 1: "i", "1": "s", "": 0, "é": 4, "../x": 5, "k" * 300: 6,
    "__ckptd__": "tensor", "tensor": 7, "file": "model.shard-000.pt", "key": "x", "kind": 8, "items": [],
    "schema": "ckpt.v2", "rng": 9, "step": 10, "wall_saved_at": 11, "tensors": 12, None: 13, -1: 14, 2.5: 15,
    b"\x00": 16, (1, ("a", None)): 17, 2**70: 18, float("inf"): 19, "\x00": 20,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, collections.Counter, functools.partial(collections.defaultdict, list)]
)
def test_every_odd_key_comes_back_in_every_kind_of_dict_also_over_tensors(kind: Any, tmp_path: Path) -> None:
    plain, tensors = kind(), kind()
    for number, (key, value) in enumerate(KEYS.items()):
        plain[key] = value
        tensors[key] = torch.tensor([float(number)])
    state = {"plain": plain, "tensors": tensors, "deep": [{"x": kind({"__ckptd__": {"__ckptd__": plain}})}]}
    for sharding in (*LAYOUTS, Sharding(by="round-robin", shards=3)):
        loaded = through_disk(tmp_path, state, sharding)
        del loaded["rng"]
        assert same(loaded, state)
    live = {"plain": kind(), "tensors": kind(), "deep": [{"x": kind()}]}
    apply_state(live, through_disk(tmp_path, state))
    assert same(live, state)


def test_keys_that_python_calls_equal_keep_their_type(tmp_path: Path) -> None:
    state = {
        "k": [
            {1: "a"},
            {True: "a"},
            {1.0: "a"},
            {0: 1},
            {False: 1},
            {-0.0: 1},
            {(1, True): 2},
        ]
    }
    assert same(through_disk(tmp_path, state, rng=False), state)


def test_numbers_keep_type_and_bits(tmp_path: Path) -> None:
    big = 2**2038
    state = {
        "n": [True, 1, 1.0, 1 + 0j, False, 0, 0.0, -0.0, 2**31, 2**63, -(2**63) - 1, big, -big, 5e-324, complex(-0.0, 1)],
        "mixed": [True, *range(100)], "floats": [float("nan"), -0.0] * 40, "ints": [-(2**63), 2**63 - 1] * 40,
        "nan": np.frombuffer(bytes.fromhex("010000000000f47f") * 70, dtype="<f8").tolist(),
        "ranges": [range(3), range(5, -5, -2), range(2**70), range(0)],
    }  # fmt: skip
    assert same(through_disk(tmp_path, state, rng=False), state)


@pytest.mark.slow
def test_very_wide_and_as_deep_as_allowed(tmp_path: Path) -> None:
    deep: Any = 1
    for level in range(97):
        deep = [deep] if level % 2 else {"k": deep}
    wide: dict[Any, Any] = {f"k{number}": number for number in range(100_000)}
    assert same(through_disk(tmp_path, {"d": deep, "w": wide}, rng=False), {"d": deep, "w": wide})


def test_the_same_list_in_two_places_becomes_two_equal_lists(tmp_path: Path) -> None:
    shared = [1, [2]]
    loaded = through_disk(tmp_path, {"a": shared, "b": (shared, shared)})
    assert loaded["a"] == loaded["b"][0] == loaded["b"][1] == shared
    assert loaded["a"] is not loaded["b"][0]


NUMPY: dict[str, Any] = {
    **{f"scalar {code}": np.zeros((), code)[()] for code in "?bBhHiIlLqQefdgFDG"},
    "times": [np.datetime64("2024-01-01T00:00", "m"), np.timedelta64(3, "us"), np.datetime64("NaT")],
    "generic": np.timedelta64(1),
    "multiple": np.array(["2024"], dtype="M8[25s]"),
    "strings": [np.array(["a", "é", ""]), np.array([b"x", b""]), np.str_("é"), np.bytes_(b"x")],
    "empty strings": np.zeros(3, "U1")[:0],
    "big endian": [np.arange(3, dtype=">f8"), np.dtype(">i2").type(3), np.array(5, ">u4")[()]],
    "shapes": [np.array(3), np.zeros((0, 3)), np.zeros((2, 0, 3), order="F"), np.ones((1, 1, 3))],
    "orders": [
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-1], np.arange(10)[::3], np.broadcast_to(np.arange(2.0), (3, 2)), np.arange(4)[1:3],
    ],
    "float bits": np.frombuffer(bytes(range(256)), dtype="<f4"),
    "bools": np.array([True, False]),
    "half": np.array([np.nan, -0.0, 6e-8], np.float16),
    "long double": np.array([np.longdouble(1) / 3]),
    "long list": [*np.arange(100).tolist(), np.int64(3)],
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMPY)
def test_numpy_comes_back_in_dtype_shape_and_bits(kind: str, tmp_path: Path) -> None:
    for sharding in LAYOUTS:
        assert same(through_disk(tmp_path, {"n": [NUMPY[kind]]}, sharding)["n"], [NUMPY[kind]])


# --- what can't be stored says what to store instead (27) -------------------------------------------


class AttrDict(dict):  # type: ignore[type-arg]
    def __getattr__(self, key: str) -> Any:
        return self[key]  # KeyError where AttributeError is due, as some libraries do


class Config(collections.abc.MutableMapping):  # type: ignore[type-arg]
    """A mapping that is no dict, as omegaconf's."""

    def __init__(self) -> None:
        self.items_: dict[Any, Any] = {"lr": 1}

    def __getitem__(self, key: Any) -> Any:
        return self.items_[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class NamedPlus(collections.namedtuple("NamedPlus", "a b")):
    """A namedtuple with something added."""


class Side(enum.Enum):
    LEFT = 1


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = {"again": value}
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = (value,)
    return value


def attributed() -> OrderedDict[str, int]:
    value = OrderedDict(a=1)
    value._metadata = None  # type: ignore[attr-defined]
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "path": (lambda: Path("x"), "str(path)"),
    "datetime": (lambda: datetime.datetime(2024, 1, 1), "isoformat"),
    "date": (lambda: datetime.date(2024, 1, 1), "isoformat"),
    "timedelta": (lambda: datetime.timedelta(1), "total_seconds"),
    "decimal": (lambda: decimal.Decimal("1.1"), "str(value)"),
    "fraction": (lambda: fractions.Fraction(1, 3), "numerator"),
    "uuid": (lambda: uuid.UUID(int=1), "str(value)"),
    "slice": (lambda: slice(1, 2), "value.start"),
    "namespace": (lambda: argparse.Namespace(lr=1), "vars(value)"),
    "simple namespace": (lambda: types.SimpleNamespace(lr=1), "vars(value)"),
    "str subclass": (lambda: type("S", (str,), {})("x"), "str(value)"),
    "int subclass": (lambda: type("I", (int,), {})(1), "int(value)"),
    "float subclass": (lambda: type("F", (float,), {})(1), "float(value)"),
    "list subclass": (lambda: type("L", (list,), {})(), "list(value)"),
    "dict subclass": (lambda: AttrDict(a=1), "dict(value)"),
    "ordered subclass": (lambda: type("O", (OrderedDict,), {})(), "dict(value)"),
    "tuple subclass": (lambda: NamedPlus(1, 2), "tuple(value)"),
    "return type": (lambda: torch.max(torch.ones(2, 2), 0), "tuple(value)"),
    "mapping": (Config, "dict(value)"),
    "mapping proxy": (lambda: types.MappingProxyType({}), "dict(value)"),
    "user dict": (lambda: collections.UserDict(a=1), "dict(value)"),
    "masked array": (lambda: np.ma.masked_array([1, 2], [True, False]), "value.mask"),
    "matrix": (lambda: np.matrix([1]), "numpy.asarray(value)"),
    "recarray": (lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]), "numpy.asarray(value)"),
    "structured array": (lambda: np.zeros(2, [("a", int)]), "one array per field"),
    "structured scalar": (lambda: np.zeros(2, [("a", int)])[0], "one array per field"),
    "object array": (lambda: np.array([{}], dtype=object), "store a list"),
    "bit generator": (lambda: np.random.PCG64(1), "numpy.random.Generator"),
    "numpy dtype": (lambda: np.dtype("f4"), "value.str"),
    "memoryview": (lambda: memoryview(b"x"), "bytes(value)"),
    "array": (lambda: array.array("d", [1]), "tolist"),
    "huge int": (lambda: 2**2040, "hex(value)"),
    "huge key": (lambda: {2**2040: 1}, "hex(value)"),
    "surrogate": (lambda: "a\ud800", "surrogatepass"),
    "surrogate key": (lambda: {"\ud800": 1}, "surrogatepass"),
    "partial": (lambda: functools.partial(print, 1), "make it again"),
    "lambda": (lambda: lambda: 1, "make it again"),
    "getter": (lambda: operator.itemgetter(1), "make it again"),
    "class": (lambda: nn.Linear, "make it again"),
    "iterator": (lambda: itertools.count(), "how far"),
    "generator": (lambda: (i for i in "x"), "how far"),
    "enum": (lambda: Side.LEFT, "ckptd.register_type(Side)"),
    "enum key": (lambda: {Side.LEFT: 1}, "key.name"),
    "numpy key": (lambda: {np.int64(1): 1}, "key.item()"),
    "complex key": (lambda: {1j: 1}, "a string, a number"),
    "frozenset key": (lambda: {frozenset(): 1}, "a string, a number"),
    "numpy element": (lambda: {np.float32(1)}, "key.item()"),
    "cycle": (cyclic, "without that reference"),
    "too deep": (lambda: deep(100), "flat"),
    "far too deep": (lambda: deep(100_000), "flat"),
    "attributes": (attributed, "as items"),
    "sub-byte dtype": (lambda: torch.uint4, "str(value)"),
    "sparse": (lambda: torch.eye(2).to_sparse_csr(), "to_dense()"),
    "meta": (lambda: torch.empty(2, device="meta"), "materialise"),
    "object": (object, "state_dict()"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:the matrix subclass", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cant_be_stored_is_refused_by_key_path_with_what_to_do_instead(
    kind: str, tmp_path: Path
) -> None:
    make, todo = REFUSED[kind]
    with pytest.raises(UnstorableState) as caught:
        ckptd.save(tmp_path / "c", {"ok": 1, "run": {"args": [0, make()]}}, step=1)
    assert caught.value.where.startswith("state['run']['args'][1]")
    assert todo in caught.value.todo
    assert not (tmp_path / "c").exists()


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_what_a_refusal_advises_is_storable(tmp_path: Path) -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    state = {
        "v": [
            str(Path("x")), datetime.datetime(2024, 1, 1).isoformat(), vars(argparse.Namespace(lr=1)), dict(Config()),
            masked.data, masked.mask, np.asarray(np.matrix([1])), array.array("d", [1]).tolist(), hex(2**3000),
            "\ud800".encode("utf-8", "surrogatepass"), np.random.Generator(np.random.PCG64(1)).bit_generator.state,
            np.asarray(array.array("d", [1])), np.dtype("f4").str, tuple(torch.max(torch.ones(2, 2), 0)),
        ]
    }  # fmt: skip
    assert same(through_disk(tmp_path, state, rng=False), state)


# --- through a client, the daemon and restore (27, 28, 30) ------------------------------------------


@pytest.mark.slow
def test_a_refused_state_reaches_no_daemon_and_the_next_one_does(places: Path) -> None:
    with ckptd.Client(places) as client:
        for step, kind in enumerate(
            ("huge int", "surrogate key", "sub-byte dtype", "enum", "object array"), 1
        ):
            with pytest.raises(UnstorableState):
                client.snapshot(step, {"x": {"y": REFUSED[kind][0]()}})
        ticket = client.snapshot(9, {"x": {"y": 1}}).wait("verified", timeout_s=30)
        assert (ticket.sequence, [one.step for one in client.checkpoints()]) == (1, [9])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")
@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(by="param-group", shards=3)], ids=["single", "sharded"]
)
def test_every_dtype_and_odd_value_goes_through_the_daemon_and_back_into_a_live_state(
    sharding: Sharding, places: Path
) -> None:
    stored = [d for d in DTYPES if str(d).removeprefix("torch.") in storage_types.STORAGE_TYPES]
    tensors = {str(dtype): views(dtype) for dtype in stored}
    state: dict[str, Any] = {"tensors": tensors, "keys": KEYS, "numpy": NUMPY}
    metrics = {
        "nan": float("nan"),
        "inf": np.float32("-inf"),
        "half": torch.tensor(0.5),
        "np": np.float32(0.1),
        "i": 3,
    }
    with ckptd.Client(places, sharding=sharding) as client:
        path = client.snapshot(1, state, metrics).wait("verified", timeout_s=60).path
        assert path is not None
        loaded = ckptd.load(path)
        assert all(same(loaded[name], state[name]) for name in state)
        live = {
            "tensors": {d: {name: zeroed(value) for name, value in group.items()} for d, group in tensors.items()},
            "keys": {}, "numpy": {},
        }  # fmt: skip
        assert client.restore(live) is not None
        assert same(live, state)
        checked_metrics(path, client.checkpoints()[0].metrics, metrics)


def checked_metrics(path: Path, seen: Any, wanted: dict[str, Any]) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    json.loads((path / "index.json").read_text(), parse_constant=refuse)
    assert {name: type(value) for name, value in seen.items()} == dict.fromkeys(wanted, float)
    assert all(np.array_equal(seen[name], float(value), equal_nan=True) for name, value in wanted.items())


def test_restored_tensors_keep_identity_and_grad_settings(tmp_path: Path) -> None:
    values = [
        torch.arange(4.0, requires_grad=True),
        nn.Parameter(torch.ones(2)),
        torch.arange(3).share_memory_(),
    ]
    live = list(map(zeroed, values))
    live[2].share_memory_()
    before = list(live)
    apply_state({"x": live}, through_disk(tmp_path, {"x": values}))
    assert all(a is b and same_tensor(a, value) for a, b, value in zip(live, before, values, strict=True))
    assert live[2].is_shared()
