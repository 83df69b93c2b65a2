"""Archives that would make torch crash, or ask for memory or time without bound, with every hash right."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.errors import CorruptCheckpoint
from ckptd.format.archive_check import check_archive
from ckptd.format.archive_records import read_records
from ckptd.limits import MAX_TREE_DEPTH
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.loaded_tree import check_tree
from ckptd.tensors.loading import load
from ckptd.tensors.saving import save
from hostile_archives import EMPTY_HOOKS, call, payload, plant, storage, tensor, text, torch_zip
from test_v1 import write_sharded, write_single

MIB = 2**20
FILLER = {"data/1": bytes(100_000)}
GOOD = payload(tensor(storage()))


def long(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def v3(dtype: str, count: int, shape: bytes, stride: bytes = b"K\1\x85", offset: bytes = b"K\0") -> bytes:
    place = storage(kind=b"ctorch.storage\nUntypedStorage\n", count=long(count))
    return call(
        "torch._utils _rebuild_tensor_v3", place, offset, shape, stride, b"\x89", EMPTY_HOOKS,
        b"ctorch\n" + dtype.encode() + b"\n",
    )  # fmt: skip


def doubled(opener: bytes, closer: bytes) -> bytes:
    """Forty containers, each holding the one before twice: a few hundred bytes, 2**40 values."""
    out = opener + b"q\0"
    for _ in range(40):
        out = b"(" + out + b"h\0" + closer if closer == b"t" else b"](" + out + b"h\0" + closer
        out += b"q\0"
    return out


#: Values that weights_only allows, or lets through to what ends the process.
VALUES: dict[str, bytes] = {
    "a storage larger than its record": tensor(storage(count=long(2**34)), shape=long(2**34) + b"\x85"),
    "a storage slightly larger than its record": tensor(storage(count=b"K\x02"), shape=b"K\x02\x85"),
    "a storage of fewer than no bytes": tensor(storage(count=long(-1))),
    "an untyped storage larger than its record": v3("uint8", 2**34, long(2**34) + b"\x85"),
    "a storage that has no record": tensor(storage(key="7")),
    "a storage that is another record": tensor(storage(key="../data.pkl")),
    "a shape larger than its storage": tensor(storage(), shape=long(2**40) + b"\x85"),
    "a shape whose size overflows": tensor(storage(), shape=long(2**33) + long(2**33) + b"\x86", stride=b"K\1K\1\x86"),
    "a stride that reaches outside": tensor(storage(), shape=b"K\2\x85", stride=long(2**40) + b"\x85"),
    "a negative stride": tensor(storage(), shape=b"K\2\x85", stride=long(-1) + b"\x85"),
    "an offset outside": v3("uint8", 4, b"K\4\x85", offset=long(2**40)),
    "a dtype wider than its storage": v3("complex128", 4, b"K\4\x85"),
    "one element expanded to 2**60": tensor(storage(), shape=long(2**60) + b"\x85", stride=b"K\0\x85"),
    "a bytearray of 100 GB": call("__builtin__ bytearray", long(10**11)),
    "an empty tensor class": call("torch FloatTensor", long(10**11)),
    "bytes in another encoding": call("_codecs encode", text("a" * 1000), text("punycode")),
    "a sparse tensor": call("torch._utils _rebuild_sparse_tensor", b"N", b"N"),
    "a tensor on no storage": call("torch._utils _rebuild_meta_tensor_no_storage", b"N", b"N", b"N", b"N"),
    "attributes of a tensor": call(
        "torch._tensor _rebuild_from_type_v2", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nTensor\n",
        storage() + b"K\0K\1\x85K\1\x85\x89" + EMPTY_HOOKS, b"}(" + text("data") + b"Nu",
    ),
    "attributes of a dict": EMPTY_HOOKS + b"}(" + text("__class__") + b"Nub",
    "a list that holds itself": b"]q\0(h\0e",
    "lists that unfold without end": doubled(b"]", b"e"),
    "tuples that unfold without end": doubled(b")", b"t"),
    "a counter": call("collections Counter"),
    "an opcode of another protocol": b"\x8c\1a",
    "no opcode": b"\xff",
    "a memo that was never put": b"h\x77",
    "a stack that is empty": b"0000",
    "a mark that was never set": b"t",
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("file", ["ckpt.pt", "meta.pt", "model.shard-001.pt"])
def test_a_value_we_never_write_is_refused_at_once(name: str, file: str, tmp_path: Path) -> None:
    sharding = Sharding() if file == "ckpt.pt" else Sharding(shards=2)
    folder = save(tmp_path / "c", {"model": nn.Linear(3, 2).state_dict()}, step=7, sharding=sharding)
    content = torch_zip(payload(VALUES[name]), {"data/0": b"abcd", **FILLER})
    if "shard" in file and "storage" in name and "its storage" not in name:
        return  # of a shard no storage is made: its tensors are those of the table
    plant(folder, file, content)
    with bounded(), pytest.raises(CorruptCheckpoint, match=file):
        load(folder)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_we_never_write_is_refused_before_torch_is_asked(name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="nothing of it was run"):
        check_archive(torch_zip(payload(VALUES[name]), {"data/0": b"abcd"}), "x", ours=True)


#: What a v1 file may hold as well; the sizes are checked all the same, and so is what the walk after it meets.
V1_TOO = [
    name for name in VALUES if "storage" in name or "unfold" in name or "itself" in name or "stack" in name
]


@pytest.mark.parametrize("name", V1_TOO)
def test_a_v1_file_is_checked_for_what_would_end_the_process_or_never_end(name: str, tmp_path: Path) -> None:
    schemas = {"ckpt.pt": "ckpt.v1", "meta.pt": "ckpt.v1-sharded"}
    for folder, file in [
        (write_single(tmp_path / "one"), "ckpt.pt"),
        (write_sharded(tmp_path / "many"), "meta.pt"),
    ]:
        hostile = payload(
            b"N", schema=text(schemas[file]), optimizer=b"}", scheduler=b"}", rng=VALUES[name],
            state=b"}(" + text("step") + b"K\x14u",
        )  # fmt: skip
        plant(folder, file, torch_zip(hostile, {"data/0": b"abcd", **FILLER}))
        with bounded(), pytest.raises(CorruptCheckpoint, match=rf"{file}: (?!keys|another step)"):
            load(folder)


def test_a_v1_shard_is_checked_too(tmp_path: Path) -> None:
    for number, name in enumerate(V1_TOO):  # in one test: each takes some milliseconds
        folder, file = write_sharded(tmp_path / str(number)), "model.shard-001.pt"
        hostile = payload(VALUES[name], schema=text("ckpt-shard.v1"))
        plant(folder, file, torch_zip(hostile, {"data/0": b"abcd", **FILLER}))
        with bounded(), pytest.raises(CorruptCheckpoint, match=rf"{file}: (?!its tensors)"):
            load(folder)


class bounded:
    """Neither long nor large; the first would be minutes, the second gigabytes."""

    def __enter__(self) -> None:
        tracemalloc.start()
        self._began = time.process_time()  # however loaded the machine is

    def __exit__(self, *_: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.process_time() - self._began < 20
        assert peak < 600 * MIB


# --- the container ----------------------------------------------------------------------------------


def good() -> bytes:
    return torch_zip(GOOD, {"data/0": b"abcd", **FILLER})


def duplicated() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")
        for data in (GOOD, b"\x80\x02N."):
            archive.writestr("x/data.pkl", data)
        archive.writestr("x/data/0", b"abcd")
    return file.getvalue()


def changed(change: Callable[[bytearray], object]) -> bytes:
    data = bytearray(good())
    change(data)
    return bytes(data)


def central(data: bytearray, number: int = 0) -> int:
    """Where an entry of the directory begins."""
    at = -1
    for _ in range(number + 1):
        at = data.index(b"PK\1\2", at + 1)
    return at


def overlapping() -> bytes:
    """A record that lies inside another: in a small file, any number of copies of its bytes."""
    data = bytearray(torch_zip(GOOD, {"data/0": bytes(200), "data/1": b"abcd"}))
    outer, inner = central(data, 2), central(data, 3)
    outer_at, inner_at = (struct.unpack_from("<I", data, at + 42)[0] for at in (outer, inner))
    inside = outer_at + 30 + len("x/data/0") + 8
    header = data[inner_at : inner_at + 30 + len("x/data/1")]
    data[inside : inside + len(header)] = header
    struct.pack_into("<I", data, inner + 42, inside)
    return bytes(data)


def named(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", GOOD)
        archive.writestr("x/data/0", b"abcd")
        archive.writestr(name, b"abcd")
    return file.getvalue()


def put(at: Callable[[bytearray], int], layout: str, *values: int) -> bytes:
    return changed(lambda data: struct.pack_into(layout, data, at(data), *values))


def end(data: bytearray) -> int:
    return len(data) - 22


def bomb() -> bytes:
    zeros = b"\x80\x02" + b"(" + b"N" * (64 * MIB) + b"t."
    return torch_zip(zeros, FILLER, zipfile.ZIP_DEFLATED)


CONTAINERS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"hello",
    "no records": lambda: b"PK\5\6" + bytes(18),
    "two records of one name": duplicated,
    "records that share bytes": overlapping,
    "a deflated pickle": lambda: torch_zip(GOOD, {"data/0": b"abcd"}, zipfile.ZIP_DEFLATED),
    "a deflated pickle of 64 MiB in 64 KiB": bomb,
    "a deflated tensor": lambda: torch_zip(GOOD, {"data/0": bytes(64 * MIB)}, zipfile.ZIP_DEFLATED),
    "a bzipped pickle": lambda: torch_zip(GOOD, {"data/0": b"abcd"}, zipfile.ZIP_BZIP2),
    "an encrypted record": lambda: put(lambda d: central(d) + 8, "<H", 1),
    "an encrypted record by its own header": lambda: put(lambda d: 6, "<H", 1),
    "a compressed record by its own header": lambda: put(lambda d: 8, "<H", 8),
    "another name in its own header": lambda: put(lambda d: 30, "<B", ord("y")),
    "two folders": lambda: named("y/data/1"),
    "a name that climbs out": lambda: named("x/../../data/1"),
    "an absolute name": lambda: named("/x/data/1"),
    "a name with a backslash": lambda: named("x\\data\\1"),
    "a name with a null": lambda: changed(lambda d: d.__setitem__(central(d) + 50, 0)),
    "code": lambda: named("x/code/__torch__.py"),
    "TorchScript's constants": lambda: named("x/constants.pkl"),
    "no pickle": lambda: named("x/data/2").replace(b"data.pkl", b"data/777"[:8]),
    "a size beyond the file": lambda: put(lambda d: central(d) + 20, "<2I", 2**31, 2**31),
    "a size of 4 GiB": lambda: put(lambda d: central(d) + 20, "<2I", 2**32 - 1, 2**32 - 1),
    "a record beyond the file": lambda: put(lambda d: central(d) + 42, "<I", 2**31),
    "a record that is no record": lambda: put(lambda d: central(d) + 42, "<I", 7),
    "a name longer than the directory": lambda: put(lambda d: central(d) + 28, "<H", 65535),
    "more records than it says": lambda: put(lambda d: end(d) + 8, "<2H", 1, 1),
    "fewer records than it says": lambda: put(lambda d: end(d) + 8, "<2H", 60000, 60000),
    "a directory elsewhere": lambda: put(lambda d: end(d) + 16, "<I", 0),
    "a directory of 4 GiB": lambda: put(lambda d: end(d) + 12, "<I", 2**32 - 1),
    "a directory that was cut": lambda: good()[:-60] + good()[-22:],
    "an end that was cut": lambda: good()[:-1],
    "a comment": lambda: put(lambda d: end(d) + 20, "<H", 3) + b"abc",
    "something before it": lambda: b"MZ" + bytes(100) + good(),
    "a wide end that points elsewhere": lambda: good()[:-22] + struct.pack("<4sIQI", b"PK\6\7", 0, 5, 1) + good()[-22:],
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_torch_save_never_makes_is_refused(name: str, tmp_path: Path) -> None:
    content = CONTAINERS[name]()
    v2 = save(tmp_path / "v2", {"n": 1}, step=7, rng=False)  # without tensors the table fits any file
    for folder, file in [
        (v2, "ckpt.pt"),
        (write_single(tmp_path / "one"), "ckpt.pt"),
        (write_sharded(tmp_path / "many"), "model.shard-001.pt"),
    ]:
        plant(folder, file, content)
        with bounded(), pytest.raises(CorruptCheckpoint, match=file):
            load(folder)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_refused_before_torch_is_asked(name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="not an archive as torch"):
        read_records(CONTAINERS[name](), "x")


@pytest.mark.parametrize("name", CONTAINERS)
def test_torch_is_asked_for_no_such_container_of_format_v1(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_single(tmp_path / "one")
    plant(folder, "ckpt.pt", CONTAINERS[name]())
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch was given the file"))
    with pytest.raises(CorruptCheckpoint, match=r"ckpt\.pt"):
        load(folder)


def test_the_archives_that_were_changed_are_otherwise_good() -> None:
    """Or each would be refused for what it has in common with the others."""
    check_archive(good(), "x", ours=True)
    assert torch.load(io.BytesIO(good()), weights_only=True)["model"]["w"].shape == (1,)
    check_archive(named("x/data/1"), "x", ours=True)


def test_a_flip_of_any_bit_of_a_small_archive_never_gets_past_with_another_layout() -> None:
    data = torch_zip(GOOD, {"data/0": b"abcd"})
    records = read_records(data, "x")
    for at in range(len(data)):
        for bit in range(8):
            hostile = bytearray(data)
            hostile[at] ^= 1 << bit
            try:
                found = read_records(bytes(hostile), "x")
            except CorruptCheckpoint:
                continue
            assert all(record.offset + record.nbytes <= len(data) for record in found.values())
            assert len(found) == len(records)


@pytest.mark.slow
def test_no_mutation_of_a_checkpoints_file_ends_the_interpreter(tmp_path: Path) -> None:
    """Thousands of hostile files, each with its hash right, in a process of their own."""
    script = Path(__file__).with_name("mutate_archive.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "300"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "300 files" in done.stdout


# --- trees ------------------------------------------------------------------------------------------


def nested(depth: int, kind: Callable[[list[Any]], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, lambda items: {"k": items[0]}])
def test_a_tree_may_be_as_deep_as_a_state_and_no_deeper(kind: Callable[[list[Any]], Any]) -> None:
    check_tree({"x": nested(MAX_TREE_DEPTH, kind)}, "x")
    with pytest.raises(CorruptCheckpoint, match="nested too deep"):
        check_tree({"x": nested(MAX_TREE_DEPTH + 10, kind)}, "x")


def test_a_tuple_a_hundred_thousand_deep_is_refused_not_recursed_into(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"n": 1}, step=7, rng=False)
    deep = payload(b"N" + b"\x85" * 100_000, schema=text("ckpt.v2"), step=b"K\7")
    plant(folder, "ckpt.pt", torch_zip(deep))
    with pytest.raises(CorruptCheckpoint, match="nested too deep"):
        load(folder)
