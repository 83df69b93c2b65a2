"""The zip container against its oracle: what torch.load reads back, and what torch.save writes."""

from __future__ import annotations

import io
import json
import math
import struct
import warnings
import zipfile
from collections import OrderedDict
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.format.archive import ArchivePlan, SlotRange, plan_archive
from ckptd.format.plan import plan_checkpoint
from ckptd.format.storage_types import STORAGE_TYPES
from ckptd.format.strides import contiguous_stride
from ckptd.snapshot.descriptor import TensorSpec
from ckptd.snapshot.descriptor_codec import decode, encode
from ckptd.snapshot.values import TensorRef
from plain_state import described, joined, of_rows, write

GIB = 2**30


def dtypes_of_torch() -> dict[str, torch.dtype]:
    return {
        str(value).removeprefix("torch."): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    }


def torch_saves(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except (KeyError, RuntimeError):
        return False
    return True


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bits, so of NaN payloads and subnormals too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dtype == torch.bool:
            return torch.rand(shape) < 0.5
        size = math.prod(shape) * dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def round_trip(state: dict[Any, Any], tmp_path: Path, *, mmap: bool = False) -> Any:
    descriptor, data = described(state)
    write(plan_checkpoint(decode(encode(descriptor))), data, tmp_path)
    return torch.load(tmp_path / "ckpt.pt", weights_only=True, mmap=mmap)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    looks = [(t.dtype, t.shape, type(t), t.requires_grad) for t in (a, b)]
    if looks[0] != looks[1] or a.numel() == 0:
        return looks[0] == looks[1]
    flat = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def test_every_dtype_that_torch_saves_is_known_with_its_size_and_storage() -> None:
    saved = {name for name, dtype in dtypes_of_torch().items() if torch_saves(dtype)}
    assert saved <= set(STORAGE_TYPES)
    legacy = {
        str(dtype).removeprefix("torch."): name
        for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    }
    for name in saved:
        assert STORAGE_TYPES[name].itemsize == dtypes_of_torch()[name].itemsize
        assert STORAGE_TYPES[name].legacy_class == legacy.get(name)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("name", sorted(set(STORAGE_TYPES) & set(dtypes_of_torch())))
def test_every_dtype_comes_back_bit_for_bit(name: str, mmap: bool, tmp_path: Path) -> None:
    dtype = dtypes_of_torch()[name]
    tensors = {"flat": noise(dtype, 7), "matrix": noise(dtype, 3, 5), "scalar": noise(dtype, 1).reshape(())}
    tensors["none"] = noise(dtype, 0).reshape(0, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = round_trip({"model": tensors}, tmp_path, mmap=mmap)["model"]
        assert list(loaded) == list(tensors)
        assert all(same_bits(loaded[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("mmap", [False, True])
def test_layouts_come_back_as_they_were(mmap: bool, tmp_path: Path) -> None:
    base = torch.randn(2, 3, 4, 5)
    tensors = {
        "channels_last": base.to(memory_format=torch.channels_last),
        "transposed": base.permute(3, 1, 0, 2),
        "big": torch.randn(300, 200).t(),
        "ones": torch.randn(1, 1, 1),
        "column": torch.randn(1, 6).t(),
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(3, 4),
        "offset": torch.arange(10.0)[3:7],
    }
    loaded = round_trip({"model": tensors}, tmp_path, mmap=mmap)["model"]
    for key in ("channels_last", "transposed", "big", "ones"):
        assert loaded[key].stride() == tensors[key].stride()
    assert all(same_bits(loaded[key], tensors[key]) for key in tensors)


def test_ties_are_stored_once_and_tied_after(tmp_path: Path) -> None:
    weight = torch.randn(64, 8)
    state = {"model": {"wte": weight, "head": weight, "copy": weight.clone()}, "ema": {"wte": weight}}
    loaded = round_trip(state, tmp_path)
    tied = [loaded["model"]["wte"], loaded["model"]["head"], loaded["ema"]["wte"]]
    assert len({tensor.data_ptr() for tensor in tied}) == 1
    assert loaded["model"]["copy"].data_ptr() != tied[0].data_ptr()
    assert same_bits(loaded["model"]["head"], weight)
    assert (tmp_path / "ckpt.pt").stat().st_size < 2 * 64 * 8 * 4 + 4096


def test_a_small_view_of_a_large_storage_takes_its_own_bytes(tmp_path: Path) -> None:
    round_trip({"x": torch.randn(1_000_000)[5:15]}, tmp_path)
    assert (tmp_path / "ckpt.pt").stat().st_size < 3000


def test_parameters_and_requires_grad_come_back(tmp_path: Path) -> None:
    state = {
        "p": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(3), requires_grad=False),
        "ints": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "bf16": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "leaf": torch.randn(3, requires_grad=True),
        "plain": torch.randn(3),
    }
    loaded = round_trip(state, tmp_path)
    assert all(same_bits(loaded[key], state[key]) for key in state)
    assert all(not tensor._backward_hooks for tensor in (loaded["p"], loaded["leaf"]))


def test_a_state_dict_keeps_its_metadata_and_type(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    loaded = round_trip({"model": model.state_dict()}, tmp_path)["model"]
    assert type(loaded) is OrderedDict
    assert loaded._metadata == model.state_dict()._metadata
    model.load_state_dict(loaded)


def test_records_are_those_of_torch_save_and_each_is_where_the_plan_says(tmp_path: Path) -> None:
    state = {"a": torch.randn(5), "b": torch.randn(70_000), "c": torch.empty(0), "d": torch.randn(100, 200)}
    torch.save(state, tmp_path / "theirs.pt")
    descriptor, data = described(state)
    plan = plan_archive(descriptor.state, descriptor.tensors, name="ours")
    content = joined(plan.segments, data)
    (tmp_path / "ours.pt").write_bytes(content)
    ours, theirs = (zipfile.ZipFile(tmp_path / f"{name}.pt") for name in ("ours", "theirs"))
    new_in_torch = {".format_version", ".storage_alignment"}
    their_names = [name.removeprefix("theirs/") for name in theirs.namelist()]
    assert [name.removeprefix("ours/") for name in ours.namelist()] == [
        n for n in their_names if n not in new_in_torch
    ]
    for name in ("version", "byteorder"):
        assert ours.read(f"ours/{name}") == theirs.read(f"theirs/{name}")
    assert len(ours.read("ours/.data/serialization_id")) == len(theirs.read("theirs/.data/serialization_id"))
    for index, row in enumerate(descriptor.tensors):
        start = plan.offsets[index]
        assert content[start : start + row.nbytes] == data[row.offset : row.offset + row.nbytes]
        assert start % (4096 if row.nbytes >= 65536 else 64) == 0
    assert plan.size == len(content)


def test_torch_finds_the_data_where_the_plan_says(tmp_path: Path) -> None:
    descriptor, data = described({"a": torch.randn(5), "b": torch.randn(70_000), "c": torch.randn(3)})
    plan = plan_archive(descriptor.state, descriptor.tensors, name="x")
    (tmp_path / "x.pt").write_bytes(joined(plan.segments, data))
    reader = torch._C.PyTorchFileReader(str(tmp_path / "x.pt"))
    assert [reader.get_record_offset(f"data/{i}") for i in range(3)] == [plan.offsets[i] for i in range(3)]


@pytest.mark.slow
def test_torch_finds_every_one_of_more_than_65536_records(tmp_path: Path) -> None:
    count = 65_536 + 5
    rows = [
        TensorSpec(path=("m", i), dtype="uint8", itemsize=1, shape=(1,), stride=None, offset=i, nbytes=1)
        for i in range(count)
    ]
    data = bytes(i % 251 for i in range(count))
    plan = plan_archive([TensorRef(i) for i in range(count)], rows, name="x")
    (tmp_path / "x.pt").write_bytes(joined(plan.segments, data))
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert bytes(tensor.item() for tensor in loaded) == data


def huge_rows(*sizes: int) -> list[TensorSpec]:
    row = TensorSpec(path=(), dtype="uint8", itemsize=1, shape=(), stride=None, offset=0, nbytes=0)
    places = zip(sizes, accumulate(sizes, initial=0), strict=False)
    return [
        msgspec.structs.replace(row, path=("m", i), shape=(n,), offset=at, nbytes=n)
        for i, (n, at) in enumerate(places)
    ]


def at(plan: ArchivePlan, offset: int, length: int) -> bytes:
    """Bytes of a planned file that are literal."""
    start = 0
    for part in plan.segments:
        size = len(part) if isinstance(part, bytes) else part.nbytes
        if start <= offset < start + size:
            assert isinstance(part, bytes)
            return part[offset - start : offset - start + length]
        start += size
    raise AssertionError(offset)


def wide_fields(extra: bytes) -> list[int]:
    while extra:
        tag, size = struct.unpack_from("<2H", extra)
        if tag == 1:
            return list(struct.unpack_from(f"<{size // 8}Q", extra, 4))
        extra = extra[4 + size :]
    return []


def directory(plan: ArchivePlan) -> list[tuple[str, int, int]]:
    """(name, size, header offset) of each record, read as a zip reader reads them: from the end."""
    tail = plan.segments[-1]
    assert isinstance(tail, bytes)
    assert tail[:4] == b"PK\6\6" and tail[56:60] == b"PK\6\7" and tail[76:80] == b"PK\5\6"
    count, size, start = struct.unpack_from("<3Q", tail, 32)
    assert struct.unpack_from("<Q", tail, 64)[0] == start + size == plan.size - len(tail)
    count16, _, start32 = struct.unpack_from("<HII", tail, 86)
    assert (count16, start32) == (min(count, 0xFFFF), min(start, 0xFFFFFFFF))
    central, found = at(plan, start, size), []
    while central:
        nbytes, packed = struct.unpack_from("<2I", central, 20)
        name_length, extra_length = struct.unpack_from("<2H", central, 28)
        offset = struct.unpack_from("<I", central, 42)[0]
        extra_at = 46 + name_length
        wide = wide_fields(central[extra_at : extra_at + extra_length])
        assert nbytes == packed
        if nbytes == 0xFFFFFFFF:
            nbytes, packed = wide.pop(0), wide.pop(0)
            assert nbytes == packed >= 0xFFFFFFFF
        if offset == 0xFFFFFFFF:
            offset = wide.pop(0)
        assert not wide
        found.append((central[46:extra_at].decode(), nbytes, offset))
        central = central[extra_at + extra_length :]
    assert len(found) == count
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        (5, 100),
        (0xFFFFFFFE, 3),
        (0xFFFFFFFF, 3),
        (4 * GIB, 3),
        (3 * GIB, 3 * GIB, 7),
        (4 * GIB, 5 * GIB, 70_000, 0),
        (2**45,),
    ],
)
def test_headers_of_huge_files_say_where_the_data_are(sizes: tuple[int, ...]) -> None:
    rows = huge_rows(*sizes)
    plan = plan_archive([TensorRef(i) for i in range(len(rows))], rows, name="x")
    records = {name: (nbytes, offset) for name, nbytes, offset in directory(plan)}
    for index, row in enumerate(rows):
        nbytes, header = records[f"x/data/{index}"]
        fixed = at(plan, header, 30)
        size32, packed32, name_length, extra_length = struct.unpack_from("<2I2H", fixed, 18)
        assert fixed[:4] == b"PK\3\4" and nbytes == row.nbytes
        extra = at(plan, header + 30 + name_length, extra_length)
        wide = wide_fields(extra)
        assert wide == ([row.nbytes, row.nbytes] if row.nbytes >= 0xFFFFFFFF else [])
        assert size32 == packed32 == min(row.nbytes, 0xFFFFFFFF)
        assert plan.offsets[index] == header + 30 + name_length + extra_length
    assert [part for part in plan.segments if isinstance(part, SlotRange)] == [
        SlotRange(row.offset, row.nbytes) for row in rows if row.nbytes
    ]


def test_torch_reads_a_file_of_nine_gib_with_holes(tmp_path: Path) -> None:
    rows = huge_rows(4 * GIB + 8, 5 * GIB, 16)
    plan = plan_archive([TensorRef(i) for i in range(3)], rows, name="x")
    path = tmp_path / "x.pt"
    with path.open("wb") as file:
        for part in plan.segments:
            if isinstance(part, bytes):
                file.write(part)
            elif part.nbytes > GIB:
                file.seek(part.nbytes - 4, io.SEEK_CUR)
                file.write(b"\1\2\3\4")
            else:
                file.write(bytes(range(part.nbytes)))
    if path.stat().st_blocks * 512 > GIB:
        pytest.skip("the file system has no holes")
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert [tensor.numel() for tensor in loaded] == [row.nbytes for row in rows]
    assert [tensor[-4:].tolist() for tensor in loaded[:2]] == [[1, 2, 3, 4]] * 2
    assert loaded[2].tolist() == list(range(16))


@given(st.lists(st.integers(0, 5), max_size=5))
def test_contiguous_strides_are_torchs(shape: list[int]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_the_same_snapshot_is_planned_to_the_same_bytes() -> None:
    descriptor, _ = described({"a": torch.randn(5), "s": {"x", "y", "z", 1, 2.5, None}})
    again = decode(encode(replace(descriptor)))
    assert plan_checkpoint(descriptor) == plan_checkpoint(again)


def test_offsets_in_the_table_are_those_of_the_archive(tmp_path: Path) -> None:
    descriptor, data = described({"model": {"w": torch.arange(4.0), "e": torch.empty(0, 3)}})
    plan = plan_checkpoint(descriptor)
    write(plan, data, tmp_path)
    first, second = json.loads(plan.table)["tensors"]
    content = (tmp_path / "ckpt.pt").read_bytes()
    assert struct.unpack_from("<4f", content, first["offset"]) == (0.0, 1.0, 2.0, 3.0)
    assert second["bytes"] == 0 and 0 < second["offset"] <= len(content)


def test_an_empty_state_is_a_file(tmp_path: Path) -> None:
    plan = plan_checkpoint(of_rows({}, [], 0))
    write(plan, b"", tmp_path)
    loaded = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert loaded == {"schema": "ckpt.v2", "wall_saved_at": 1_700_000_000.25, "step": 7}
