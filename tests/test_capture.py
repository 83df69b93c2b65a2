from __future__ import annotations

import random
import socket
import threading
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.errors import CkptdError, InvalidArgument, UnstorableState
from ckptd.snapshot.descriptor import Sharding
from ckptd.snapshot.values import PackedNumbers, TensorRef
from ckptd.tensors.capture import Captured, capture, copy_into
from ckptd.tensors.number_lists import pack_numbers
from round_trip import LAYOUT_IDS, LAYOUTS, same, through_disk

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    a: int
    b: Any


class Holder:
    """An object with a state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


class Colour(IntEnum):
    RED = 1


def region(captured: Captured) -> np.ndarray:
    buffer = np.full(captured.data_bytes, 0xEE, np.uint8)
    copy_into(captured, buffer)
    return buffer


# --- isolation: the state at the moment of the call (field cases 1, 2, 4) -------------------------


def test_what_the_trainer_changes_after_the_call_is_not_in_the_snapshot(tmp_path: Path) -> None:
    tensors = [torch.full((100,), float(i)) for i in range(200)]
    state = {"tensors": tensors, "losses": [0.5] * 100, "count": {"n": [1, 2]}, "array": np.arange(5)}
    captured = capture(state, rng=False)
    buffer = region(captured)
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            for tensor in tensors:
                tensor.add_(1)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        state["losses"].append(9.0)  # type: ignore[attr-defined]
        state["count"]["n"].append(3)  # type: ignore[index]
        state["array"][0] = 7  # type: ignore[index]
        for row in captured.tensors[:200]:
            seen = buffer[row.offset : row.offset + row.nbytes].view(np.float32)
            assert set(seen.tolist()) == {float(row.path[1])}
    finally:
        stop.set()
        trainer.join()
    assert captured.state["losses"] == PackedNumbers("d", np.full(100, 0.5).tobytes())
    assert captured.state["count"] == {"n": [1, 2]}
    array = captured.tensors[200]
    assert buffer[array.offset : array.offset + array.nbytes].view(np.int64).tolist() == [0, 1, 2, 3, 4]


def test_five_snapshots_hold_five_contents_through_every_change_of_layout(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "x": torch.zeros(4)}
    seen = []
    for number in range(5):
        if number == 1:
            state["x"] = torch.ones(2, 3, dtype=torch.bfloat16)
        if number == 2:
            model.register_parameter("extra", nn.Parameter(torch.full((3,), 5.0)))
        if number == 3:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        if number == 4:
            state["x"] = torch.ones(3, 2, dtype=torch.bfloat16).t()
        with torch.no_grad():
            model.weight.fill_(number)
        loaded = through_disk(tmp_path, state)
        assert loaded["model"]["weight"].unique().tolist() == [number]
        assert same(loaded["x"], state["x"])
        seen.append(loaded)
    assert [len(each["model"]) for each in seen] == [2, 2, 3, 3, 3]
    assert [len(each["optimizer"]["state"]) for each in seen] == [0, 0, 0, 2, 2]


def test_shared_and_graph_tensors_and_parameters_come_back_detached_and_of_their_type(tmp_path: Path) -> None:
    leaf = torch.ones(3, requires_grad=True)
    state = {
        "x": {
            "shared": torch.arange(4).share_memory_(),
            "graph": leaf * 2,
            "leaf": leaf,
            "parameter": nn.Parameter(torch.ones(2)),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        }
    }
    for sharding in LAYOUTS:
        x = through_disk(tmp_path, state, sharding)["x"]
        assert {name: type(value) for name, value in x.items()} == {
            "shared": torch.Tensor,
            "graph": torch.Tensor,
            "leaf": torch.Tensor,
            "parameter": nn.Parameter,
            "frozen": nn.Parameter,
        }
        grads = {name: value.requires_grad for name, value in x.items()}
        assert grads == {"shared": False, "graph": False, "leaf": True, "parameter": True, "frozen": False}
        assert x["graph"].tolist() == [2, 2, 2]
        assert x["graph"].grad_fn is None


def test_capturing_changes_nothing_and_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    generator, numpy_generator = torch.Generator(), np.random.default_rng(1)
    state = {"model": model, "optimizer": optimizer, "g": generator, "n": numpy_generator}
    versions = [p._version for p in model.parameters()]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    own = (generator.get_state().tolist(), numpy_generator.bit_generator.state)
    region(capture(state))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert (generator.get_state().tolist(), numpy_generator.bit_generator.state) == own
    assert [p._version for p in model.parameters()] == versions
    assert all(p.grad is not None for p in model.parameters())


def test_the_generators_are_read_before_any_state_dict_runs() -> None:
    state = {"x": Holder(None)}
    state["x"].state_dict = lambda: torch.rand(1).item()  # type: ignore[method-assign]
    before = torch.get_rng_state()
    captured = capture(state)
    row = captured.tensors[captured.state["rng"]["torch"].index]
    assert region(captured)[row.offset : row.offset + row.nbytes].tolist() == before.tolist()


# --- refusals name the key path (field case 5) -----------------------------------------------------


class Raises(Holder):
    def state_dict(self) -> Any:
        raise RuntimeError("not now")


class OnlyGives:
    def state_dict(self) -> Any:
        return {}


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def with_attribute() -> OrderedDict[str, int]:
    value = OrderedDict(a=1)
    value.more = 1  # type: ignore[attr-defined]
    return value


def attributed(value: Any) -> Any:
    value.more = 1
    return value


class DTensor(torch.Tensor):
    pass


UNSTORABLE = {
    "lambda": lambda: lambda: 1,
    "class": lambda: Holder,
    "module": lambda: np,
    "object": object,
    "enum": lambda: Colour.RED,
    "path": lambda: PurePath("x"),
    "str subclass": lambda: type("S", (str,), {})("x"),
    "dict subclass": lambda: type("D", (dict,), {})(),
    "list subclass": lambda: type("L", (list,), {})(),
    "slice": lambda: slice(3),
    "state_dict raises": lambda: Raises(1),
    "state_dict only": OnlyGives,
    "below state_dict": lambda: Holder({"a": object()}),
    "cycle": cyclic,
    "too deep": lambda: deep(200),
    "attribute": with_attribute,
    "attribute of a Counter": lambda: attributed(Counter("ab")),
    "attribute of a Random": lambda: attributed(random.Random(1)),
    "numpy subclass": lambda: type("F", (np.float64,), {})(1.0),
    "array of no bytes an item": lambda: np.zeros(3, [("a", "U0")])["a"],
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "fp8 negated lazily": lambda: torch._neg_view(torch.ones(3).to(torch.float8_e4m3fn)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "key of 5000 digits": lambda: {10**5000: 1},
    "factory": lambda: defaultdict(lambda: 1),
    "object array": lambda: np.array([object()]),
    "structured array": lambda: np.zeros(2, dtype=[("a", int), ("b", float)]),
    "masked array": lambda: np.ma.masked_array([1, 2]),
    "key": lambda: {np.int64(1): 2},
    "object key": lambda: {frozenset(): 2},
    "set element": lambda: {np.float32(1)},
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: torch.ones(2).as_subclass(DTensor),
    "lazy": lambda: nn.LazyLinear(3),
    "sub-byte": lambda: torch.empty(4, dtype=torch.int4),
    "surrogate": lambda: "\ud800",
    "generator": lambda: (i for i in range(3)),
}


@pytest.mark.parametrize("kind", UNSTORABLE)
def test_a_leaf_that_cant_be_stored_is_refused_by_key_path_and_later_ones_work(
    kind: str, tmp_path: Path
) -> None:
    state = {"fine": [1], "bad": {"list": [0, UNSTORABLE[kind]()]}}
    with pytest.raises(UnstorableState) as caught:
        through_disk(tmp_path, state)
    assert caught.value.where.startswith("state['bad']['list'][1]"), str(caught.value)
    assert not list(tmp_path.iterdir())
    state["bad"] = {"list": [0, 1]}
    assert through_disk(tmp_path, state, rng=False) == state


def test_an_open_file_and_a_socket_are_refused_by_key_path(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file, socket.socket() as sock:
        for value in (file, sock):
            with pytest.raises(UnstorableState, match=r"state\['a'\]\[1\]"):
                capture({"a": [1, value]})


def test_a_quantized_tensor_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said once per process only
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnstorableState, match="quantized"):
        capture({"a": quantized})


def test_a_tensor_inside_functionalize_is_refused() -> None:
    def snapshot(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        y.add_(1)  # put off: the memory has still what it had
        with pytest.raises(UnstorableState, match="functionalize") as caught:
            capture({"a": y})
        assert caught.value.where == "state['a']"
        return y

    assert torch.func.functionalize(snapshot)(torch.ones(3)).tolist() == [2, 2, 2]


def test_what_is_said_of_a_tensor_of_another_layout_is_so() -> None:
    with pytest.raises(UnstorableState, match="mkldnn tensor") as caught:
        capture({"a": torch.ones(3).to_mkldnn()})
    assert "sparse" not in str(caught.value)
    with pytest.raises(UnstorableState, match="lazily negated") as caught:
        capture({"a": torch._neg_view(torch.ones(3).to(torch.float8_e4m3fn))})
    assert "view of" in caught.value.todo


@pytest.mark.parametrize("name", ["schema", "wall_saved_at", "step", "rng", "__ckptd__"])
def test_a_reserved_name_is_refused(name: str) -> None:
    with pytest.raises(UnstorableState, match=name):
        capture({name: 1})


@pytest.mark.parametrize("state", [None, [1], 3, "model"])
def test_a_state_that_is_no_dict_is_refused(state: Any) -> None:
    with pytest.raises(InvalidArgument):
        capture(state)


# --- fidelity (field cases 27, 28, 29) -------------------------------------------------------------

VALUES: dict[str, Any] = {
    "keys": {
        "a": {"b": 1},
        "a.b": 2,
        "a/b": 3,
        1: "i",
        "1": "s",
        "": 0,
        "é": 4,
        "../x": 5,
        "k" * 300: 6,
        "tensor": 7,
        "file": 8,
        "[1]": 9,
        None: 10,
        (1, "x", (2,)): 11,
        b"\x00": 12,
        2.5: 13,
        -1: 14,
    },
    "bool key": {True: 1, 2: 3},
    "marker": {"__ckptd__": "tensor", "file": "model.shard-000.pt", "key": "x"},
    "marker nested": {"__ckptd__": {"__ckptd__": {"__ckptd__": 1}}},
    "marker kinds": [{"__ckptd__": kind} for kind in ("dict", "odict", "namedtuple", "ndarray", 1, None)],
    "marker ordered": OrderedDict([("__ckptd__", 1), ("b", 2)]),
    "empty": [[], [{}], {}, (), ((),), set(), frozenset(), "", b"", bytearray(), deque(), OrderedDict()],
    "numbers": [
        None,
        True,
        False,
        0,
        1,
        1.0,
        -1,
        2**31,
        2**63 - 1,
        2**63,
        -(2**63),
        2**70,
        -(2**70),
        0.1,
        -0.0,
    ],
    "special": [float("inf"), float("-inf"), float("nan"), 5e-324, 1e308, complex(1, -0.0), 1j],
    "nan payload": [np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf4\x7f")[0].item()],
    "strings": ["", "a", "é", "日本", "\x00", "\n", "🎉", "x" * 100_000, b"\xff\x00", bytearray(b"abc")],
    "long list of floats": [0.5, float("nan"), -0.0] * 1000,
    "long list of ints": list(range(-500, 500)),
    "long list of large ints": [2**64] * 100,
    "long list of bools": [True, False] * 100,
    "long mixed list": [1, 1.0] * 100,
    "tuples": [(1,), (1, (2, [3])), ()],
    "sets": [{1, "a", None, (1, 2), 2.5}, frozenset({1, b"x"})],
    "namedtuples": [Point(1, [2]), Typed(1, {"x": Point(0, 0)})],
    "ordered": OrderedDict([("z", 1), ("a", OrderedDict(b=1))]),
    "defaultdicts": [
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {1: 2}),
        defaultdict(dict, {"x": {"y": 1}}),
    ],
    "counter": Counter("aabbb"),
    "deques": [deque([1, [2]]), deque([1, 2, 3], maxlen=3)],
    "scalars": [
        np.float32(1.5),
        np.float64("nan"),
        np.int64(2),
        np.uint8(3),
        np.bool_(True),
        np.float16(0.5),
        np.complex64(1j),
        np.str_("é"),
        np.bytes_(b"x"),
        np.datetime64("2024-01-01"),
        np.timedelta64(3, "s"),
        np.longdouble(1) / 3,
    ],
    "arrays": [
        np.arange(6).reshape(2, 3),
        np.array(3.0),
        np.zeros((0, 3)),
        np.array(["a", "é"]),
        np.array([b"x"]),
        np.array([True]),
        np.arange(6, dtype=">i4"),
        np.arange(6.0)[::2],
        np.array(["2024"], dtype="M8[D]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=np.float16),
        np.broadcast_to(np.arange(2), (3, 2)),
    ],
    "torch things": [
        torch.Size([1, 2]),
        torch.Size([]),
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda:1"),
    ],
}


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_in_value_and_type(name: str, sharding: Sharding, tmp_path: Path) -> None:
    loaded = through_disk(tmp_path, {"value": VALUES[name]}, sharding, rng=False)
    assert same(loaded["value"], VALUES[name]), loaded["value"]


def test_keys_of_the_top_level_come_back_too(tmp_path: Path) -> None:
    state = {1: "i", "1": "s", "a.b": 2, "../x": torch.ones(2), (1, 2): torch.zeros(1), "": 5}
    for sharding in LAYOUTS:
        assert same(through_disk(tmp_path, state, sharding, rng=False), state)


def test_every_file_opens_with_plain_torch_load(tmp_path: Path) -> None:
    from ckptd.tensors.saving import save

    for number, sharding in enumerate(LAYOUTS):
        folder = save(
            tmp_path / str(number), {"value": VALUES, "t": torch.ones(3)}, step=3, sharding=sharding
        )
        for file in folder.glob("*.pt"):
            assert torch.load(file, weights_only=True)["schema"].startswith("ckpt")


def test_a_namedtuple_of_a_class_this_process_lacks_comes_back_alike(tmp_path: Path) -> None:
    kind = namedtuple("Elsewhere", "a b")
    value = through_disk(tmp_path, {"v": kind(1, 2)})["v"]
    assert (type(value).__name__, value._fields, tuple(value)) == ("Elsewhere", ("a", "b"), (1, 2))


DTYPES = sorted({str(d) for d in vars(torch).values() if isinstance(d, torch.dtype) and d.itemsize <= 16})


def bits_of(dtype: torch.dtype) -> torch.Tensor:
    """Values with many byte patterns: NaN payloads, infinities, subnormals, both zeros."""
    raw = torch.arange(256, dtype=torch.uint8).repeat(dtype.itemsize)
    if dtype is torch.bool:
        raw = raw % 2
    return raw[torch.randperm(raw.numel(), generator=torch.Generator().manual_seed(0))].view(dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf|BComplex32")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits_or_is_refused(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name.removeprefix("torch."))
    if name.startswith(("torch.qu", "torch.qi")):
        pytest.skip("quantized: refused, tested apart")
    values = bits_of(dtype)
    state = {
        "t": {
            "all": values,
            "0-dim": values[3],
            "empty": values[:0],
            "rows": values[:8].view(2, 4).t(),
            "offset": values[5:7],
        }
    }
    try:
        capture(state)
    except UnstorableState as error:
        assert name.removeprefix("torch.")[:3] in ("int", "uin"), str(
            error
        )  # the sub-byte ones, which torch can't save
        return
    for sharding in LAYOUTS:
        loaded = through_disk(tmp_path, state, sharding)["t"]
        for key, value in state["t"].items():
            assert same(loaded[key], value), key


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_every_layout_in_memory_keeps_values_and_dense_strides(sharding: Sharding, tmp_path: Path) -> None:
    base = torch.arange(120.0)
    image = torch.arange(120.0).view(2, 3, 4, 5)
    tensors = {
        "transposed": base.view(10, 12).t(),
        "strided": base[::3],
        "offset": base[7:19],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels last": image.to(memory_format=torch.channels_last),
        "permuted": image.permute(3, 1, 0, 2),
        "negative view": torch.arange(4.0).neg(),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "ones dims": torch.arange(3.0).view(1, 3, 1),
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3, 0),
        "overlapping": torch.as_strided(base, (3, 3), (1, 1)),
    }
    loaded = through_disk(tmp_path, {"t": tensors}, sharding)["t"]
    for name, tensor in tensors.items():
        assert same(loaded[name], tensor), name
    for name in ("transposed", "channels last", "permuted"):
        assert loaded[name].stride() == tensors[name].stride()
    assert loaded["expanded"].is_contiguous()


def test_a_small_view_of_a_large_storage_takes_its_own_bytes_only() -> None:
    captured = capture({"v": torch.zeros(1_000_000)[5:15]}, rng=False)
    assert captured.data_bytes == 40


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("sharding", [*LAYOUTS, Sharding(shards=5)])
def test_tied_weights_are_stored_once_and_tied_after(sharding: Sharding, tmp_path: Path) -> None:
    model = Tied()
    captured = capture({"model": model}, rng=False)
    assert captured.data_bytes == 1600
    assert len(captured.sources) == 1
    assert captured.tensors[1].alias_of == 0
    loaded = through_disk(tmp_path, {"model": model}, sharding)["model"]
    loaded["embed.weight"][0, 0] = 99.0
    assert loaded["head.weight"][0, 0] == 99.0


def test_a_tie_across_components_is_found_and_loads_whole_from_either(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    state = {"model": model, "ema": {"w": model.weight, "other": model.weight[:1]}}
    for sharding in LAYOUTS:
        loaded = through_disk(tmp_path, state, sharding)
        assert torch.equal(loaded["ema"]["w"], model.weight)
        assert torch.equal(loaded["model"]["weight"], model.weight)
        assert torch.equal(loaded["ema"]["other"], model.weight[:1])


def test_views_that_only_overlap_are_not_tied() -> None:
    x = torch.arange(6.0)
    captured = capture(
        {"a": [x[:3], x[:2], x.view(2, 3), x.view(torch.int32), x[3:], x[:0], x[:0]]}, rng=False
    )
    assert [row.alias_of for row in captured.tensors] == [None] * 7


def test_the_metadata_of_a_state_dict_survives(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    for sharding in LAYOUTS:
        loaded = through_disk(tmp_path, {"model": model}, sharding)["model"]
        assert loaded._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_tensors_and_tagged_values_in_the_metadata_come_back(sharding: Sharding, tmp_path: Path) -> None:
    value = OrderedDict(a=torch.ones(2))
    inner = OrderedDict(b=1)
    inner._metadata = [deque([3])]  # type: ignore[attr-defined]
    value._metadata = {"t": torch.zeros(2), "m": {"__ckptd__": torch.ones(1)}, "s": np.ones(2), "o": inner}  # type: ignore[attr-defined]
    state = {"x": {"in": value}}
    assert same(through_disk(tmp_path, state, sharding, rng=False), state)


def test_generators_in_the_state_come_back_and_draw_on(tmp_path: Path) -> None:
    state = {
        "t": torch.Generator().manual_seed(3),
        "n": [np.random.default_rng(4), np.random.Generator(np.random.Philox(1))],
        "r": np.random.RandomState(5),
        "p": random.Random(6),
    }
    loaded = through_disk(tmp_path, state)
    assert torch.rand(3, generator=loaded["t"]).tolist() == torch.rand(3, generator=state["t"]).tolist()
    assert [g.random() for g in loaded["n"]] == [g.random() for g in state["n"]]  # type: ignore[attr-defined]
    assert loaded["r"].rand() == state["r"].rand()  # type: ignore[attr-defined]
    assert loaded["p"].random() == state["p"].random()  # type: ignore[attr-defined]


# --- the region and what it needs -------------------------------------------------------------------


def test_offsets_are_aligned_and_ranges_dont_overlap() -> None:
    tensors = [torch.ones(n) for n in (1, 3, 100_000, 7, 20_000, 0, 5)]
    captured = capture({"t": tensors}, rng=False)
    end = 0
    for row in captured.tensors:
        if row.nbytes:
            assert row.offset >= end
            assert row.offset % (4096 if row.nbytes >= 65536 else 64) == 0
            end = row.offset + row.nbytes
    assert captured.data_bytes == end


@pytest.mark.parametrize("buffer", [bytearray(8), bytes(4096)])
def test_a_buffer_that_is_too_small_or_read_only_is_refused(buffer: Any) -> None:
    with pytest.raises(InvalidArgument):
        copy_into(capture({"t": torch.ones(3)}, rng=False), memoryview(buffer))


def test_no_reference_to_the_buffer_is_kept() -> None:
    import mmap

    captured = capture({"t": torch.ones(30)})
    with mmap.mmap(-1, captured.data_bytes) as region, memoryview(region) as view:
        copy_into(captured, view)


def test_packed_lists_are_only_those_that_come_back_the_same() -> None:
    assert pack_numbers([True] * 3) is None
    assert pack_numbers([1, 1.0]) is None
    assert pack_numbers([2**63]) is None
    assert pack_numbers([1.0, -0.0]) == PackedNumbers("d", np.array([1.0, -0.0]).tobytes())
    assert pack_numbers([-1]) == PackedNumbers("q", np.array([-1]).tobytes())


def test_a_hundred_thousand_losses_take_under_a_few_milliseconds() -> None:
    losses = [0.25] * 100_000
    best = min(_timed(lambda: capture({"losses": losses}, rng=False)) for _ in range(5))
    assert best < 0.02


def _timed(call: Any) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def test_every_refusal_is_one_of_ours() -> None:
    for make in UNSTORABLE.values():
        try:
            capture({"x": make()})
        except CkptdError as error:
            assert error.where.startswith("state['x']")


def test_tensor_refs_number_the_rows() -> None:
    captured = capture({"a": torch.ones(1), "b": [torch.ones(2)]}, rng=False)
    assert captured.state == {"a": TensorRef(0), "b": [TensorRef(1)]}
    assert [row.path for row in captured.tensors] == [("a",), ("b", 0)]
