"""The pickle emitter against its oracle: what torch.load reads back, and what torch.save writes."""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from ckptd.errors import UnstorableState
from ckptd.format.archive import plan_archive
from ckptd.format.pickle_emit import emit
from ckptd.format.storage_types import DTYPE_NAMES
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.snapshot.descriptor_codec import decode, encode
from ckptd.snapshot.values import DeviceValue, DtypeValue, PackedNumbers, SizeValue, TensorRef
from plain_state import described, joined
from test_descriptor_codec import TREES, exact


def plain_archive(value: Any, rows: list[TensorSpec] | None = None) -> Any:
    """value written by us and read by torch."""
    plan = plan_archive(value, rows or [], name="x")
    return torch.load(io.BytesIO(joined(plan.segments, b"")), weights_only=True)


def round_trip(value: Any) -> Any:
    """value through a descriptor and an archive to torch."""
    descriptor, data = described({"x": value})
    descriptor = decode(encode(descriptor))
    plan = plan_archive(descriptor.state, descriptor.tensors, name="x")
    return torch.load(io.BytesIO(joined(plan.segments, data)), weights_only=True)["x"]


ODD_KEYS = {
    "a": {"b": 1}, "a.b": 2, "a/b": 3, 1: "i", "1": "s", "": 0, "é": 4, "../x": 5, None: 6, 1.5: 7, b"k": 8,
    (1, "x", (None, 2.0)): 9, "k" * 300: 10, "__ckptd__": 11,
}  # fmt: skip
INT_EDGES = [
    0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63, 2**70, -(2**70),
    2**2039 - 1, -(2**2039),
]  # fmt: skip
VALUES = {
    "empty": [[], [{}], {}, (), set(), "", b"", OrderedDict()],
    "types": [True, 1, 1.0, False, 0, -0.0, 0.0, None],
    "floats": [math.nan, math.inf, -math.inf, 5e-324, 1.7e308],
    "complex": [1 + 2j, complex(-0.0, math.inf), complex(math.nan, -0.0)],
    "bytes": [b"ab\xff\x00", bytes(range(256)), "latin1"],
    "sets": [{1, "a", (1, 2)}, {None, b"x", 2.5}],
    "tuples": [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, (2,)),)],
}


@pytest.mark.parametrize("value", [ODD_KEYS, INT_EDGES, *VALUES.values()])
def test_plain_values_come_back_in_value_and_type(value: Any) -> None:
    assert exact(round_trip(value)) == exact(value)


def test_torch_values_come_back() -> None:
    devices = [torch.device(text) for text in ("cpu", "cuda", "cuda:3", "meta", "mps:0")]
    dtypes = [getattr(torch, name) for name in sorted(DTYPE_NAMES) if hasattr(torch, name)]
    values = [torch.Size([]), torch.Size([2**40, 0, 1, 5, 6]), devices, dtypes]
    loaded = round_trip(values)
    assert loaded == values
    assert type(loaded[0]) is torch.Size


def test_one_row_met_twice_is_one_tensor() -> None:
    row = TensorSpec(path=("a",), dtype="uint16", itemsize=2, shape=(0,), stride=None, offset=0, nbytes=0)
    first, second = plain_archive([TensorRef(0), TensorRef(0)], [row])
    assert first is second
    assert first.dtype == torch.uint16


@settings(max_examples=60)
@given(TREES)
def test_any_plain_tree_comes_back_through_a_file(tree: Any) -> None:
    loaded = plain_archive(tree)
    assert exact(loaded) == exact(live(tree))


def live(value: Any) -> Any:
    """A plain tree as a loader sees it."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(live(item) for item in value)
    if kind in (dict, OrderedDict):
        result = kind((key, live(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):
            result._metadata = live(value._metadata)
        return result
    if kind is PackedNumbers:
        return list(struct.unpack(f"<{len(value.data) // 8}{value.typecode}", value.data))
    if kind is SizeValue:
        return torch.Size(value.dims)
    if kind is DtypeValue:
        return getattr(torch, value.name)
    return torch.device(value.name) if kind is DeviceValue else value


INT32, INT64 = [-(2**31), 2**31 - 1], [-(2**63), 2**63 - 1, 0] * 5000


@pytest.mark.parametrize("numbers", [[], [1.5], [math.nan, -0.0] * 5000, [3], INT32, [2**31], INT64])
def test_packed_numbers_are_a_plain_list_in_the_file(numbers: list[Any]) -> None:
    code = "d" if any(isinstance(x, float) for x in numbers) else "q"
    packed = PackedNumbers(code, struct.pack(f"<{len(numbers)}{code}", *numbers))
    assert exact(plain_archive(packed)) == exact(numbers)


@pytest.mark.parametrize(
    "value",
    [
        DtypeValue("float32\ncos\nsystem"), DtypeValue("int4"), DeviceValue("cuda:x"),
        DeviceValue("a b"), object(),
        2**2040, -(2**2040), float,
    ],
)  # fmt: skip
def test_nothing_but_plain_values_is_spelled(value: Any) -> None:
    with pytest.raises(UnstorableState):
        emit(value, [])


def test_the_pickle_has_the_opcodes_and_globals_of_torch_save(tmp_path: Path) -> None:
    state = {
        "model": OrderedDict(a=torch.arange(6.0).reshape(2, 3), b=torch.ones(3, dtype=torch.uint16)),
        "p": torch.nn.Parameter(torch.ones(2)), "set": {1}, "big": 2**70, "c": 1 + 2j, "bytes": b"ab\xff",
        "t": (1, (2, 3, 4, 5)), "size": torch.Size([1]), "d": torch.device("cuda:1"), "l": [1.5, None, True],
    }  # fmt: skip
    torch.save(state, tmp_path / "theirs.pt")
    descriptor, data = described(state)
    plan = plan_archive(descriptor.state, descriptor.tensors, name="ours")
    (tmp_path / "ours.pt").write_bytes(joined(plan.segments, data))
    archives = {name: zipfile.ZipFile(tmp_path / f"{name}.pt") for name in ("ours", "theirs")}
    ours, theirs = (_stripped(archive.read(f"{name}/data.pkl")) for name, archive in archives.items())
    assert ours == theirs


def _stripped(pickle: bytes) -> list[Any]:
    """Opcodes without the memo's numbers and puts, and without the framing of dicts and lists of one item."""
    framing = {"BINPUT", "LONG_BINPUT", "MARK", "SETITEM", "SETITEMS", "APPEND", "APPENDS"}
    names: dict[int, Any] = {}
    out: list[Any] = []
    last: Any = None
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            names[argument] = last
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            out.append(names[argument])
        elif opcode.name not in framing:
            out.append((opcode.name, argument))
        last = out[-1] if out else None
    return out
