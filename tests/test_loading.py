from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptd
from ckptd.disk import checkpoint_reader, read_blocks
from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.reader import Span
from ckptd.errors import (
    CheckpointGone,
    CkptdError,
    CorruptCheckpoint,
    InvalidArgument,
    NothingThere,
    UnknownSchema,
)
from ckptd.format.records import index_to_bytes, read_index
from ckptd.snapshot.descriptor import Sharding
from ckptd.tensors.loading import load, load_with_index
from ckptd.tensors.saving import save
from round_trip import LAYOUT_IDS, LAYOUTS, same

Patch = pytest.MonkeyPatch


def small_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": nn.Linear(3, 2).state_dict(), "n": {"step": 3}}


@pytest.fixture(params=LAYOUTS, ids=LAYOUT_IDS)
def sharding(request: pytest.FixtureRequest) -> Sharding:
    found: Sharding = request.param
    return found


@pytest.fixture
def folder(tmp_path: Path, sharding: Sharding) -> Path:
    return save(tmp_path / "c", small_state(), step=7, sharding=sharding, rng=False)


def refused(folder: Path) -> bool:
    try:
        load(folder)
    except (CorruptCheckpoint, CheckpointGone) as error:
        assert isinstance(error, (ValueError, NothingThere))
        return True
    return False


def flips(name: str, data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        # one bit; in the index also the bits between "ckpt.v2" and "ckpt.v1", and all of them
        for mask in (1 << at % 8, 0x03, 0xFF) if name == "index.json" else (1 << at % 8,):
            changed = bytearray(data)
            changed[at] ^= mask
            yield bytes(changed)


def detected(folder: Path, name: str, number: int) -> bool:
    """By a load; between every eighth change of a file whose hash the index has, by the reading that a load does."""
    if name == "index.json" or number % 8 == 0:
        return refused(folder)
    with CheckpointReader(str(folder)) as reader, pytest.raises(CorruptCheckpoint):
        reader.read(name)
    return True


@pytest.mark.slow
def test_a_flip_of_any_byte_of_any_file_is_detected(folder: Path) -> None:
    wanted = load(folder)
    count = 0
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        for changed in flips(file.name, data):
            file.write_bytes(changed)
            assert detected(folder, file.name, count), f"{file.name} {count}"
            count += 1
        file.write_bytes(data)
    assert count > 4000
    assert same(load(folder), wanted)


def test_a_damaged_file_is_named_with_both_hashes(folder: Path) -> None:
    file = max(folder.glob("*.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint) as caught:
        load(folder)
    assert caught.value.where == str(file)
    assert len(caught.value.seen) == len(caught.value.wanted) == 64
    assert caught.value.seen != caught.value.wanted


@pytest.mark.parametrize(
    "change", ["shorter", "longer", "empty", "missing", "folder", "link", "fifo", "zeroed"]
)
def test_every_file_damaged_in_every_way_is_detected(folder: Path, change: str, tmp_path: Path) -> None:
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        if change == "shorter":
            file.write_bytes(data[:-1])
        elif change == "longer":
            file.write_bytes(data + b"\0")
        elif change == "empty":
            file.write_bytes(b"")
        elif change == "zeroed":
            file.write_bytes(bytes(len(data)))
        else:
            file.unlink()
            if change == "folder":
                file.mkdir()
            elif change == "link":
                (tmp_path / "elsewhere").write_bytes(data)
                file.symlink_to(tmp_path / "elsewhere")
            elif change == "fifo":
                os.mkfifo(file)
        assert refused(folder), file.name
        file.rmdir() if change == "folder" else file.unlink(missing_ok=True)
        file.write_bytes(data)
    load(folder)


def test_files_swapped_between_two_checkpoints_are_detected(tmp_path: Path, sharding: Sharding) -> None:
    one = save(tmp_path / "one", small_state(), step=1, sharding=sharding)
    two = save(tmp_path / "two", {**small_state(), "n": {"step": 4}}, step=2, sharding=sharding)
    for file in sorted(one.iterdir()):
        data, other = file.read_bytes(), (two / file.name).read_bytes()
        if data != other and file.name != "index.json":
            file.write_bytes(other)
            assert refused(one), file.name
            file.write_bytes(data)
    shutil.copy(two / "index.json", one / "index.json")
    assert refused(one)


def test_shards_swapped_with_each_other_are_detected(tmp_path: Path) -> None:
    state = {"model": {"a": torch.zeros(4), "b": torch.ones(4)}}
    folder = save(tmp_path / "c", state, step=1, sharding=Sharding(shards=2))
    first, second = sorted(folder.glob("model.*"))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert refused(folder)


def test_the_index_and_step_come_with_the_components(folder: Path) -> None:
    loaded = load_with_index(folder)
    assert loaded.index is not None
    assert (loaded.step, loaded.index.step) == (7, 7)
    assert sorted(loaded.components) == ["model", "n"]


def test_a_missing_checkpoint_is_gone_not_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CheckpointGone):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointGone):
        load(tmp_path / "nothing" / "deeper")


def test_an_empty_folder_is_corrupt_when_it_has_a_checkpoints_name(tmp_path: Path) -> None:
    (tmp_path / "step-000000007").mkdir()
    with pytest.raises(CorruptCheckpoint, match=r"index\.json"):
        load(tmp_path / "step-000000007")


def test_an_unknown_schema_is_refused_by_name(folder: Path) -> None:
    index = folder / "index.json"
    index.write_text(index.read_text().replace("ckpt.v2-index", "ckpt.v9-index"))
    with pytest.raises(UnknownSchema, match=r"ckpt\.v9-index"):
        load(folder)


def test_a_data_file_of_v2_taken_out_of_its_folder_is_no_checkpoint_of_v1(
    folder: Path, tmp_path: Path
) -> None:
    file = next(folder.glob("*.pt"))
    with pytest.raises(UnknownSchema):
        load(shutil.copy(file, tmp_path / file.name))


def test_only_reads_the_files_of_the_components_asked_for(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "big": {"x": torch.ones(4)}, "n": 1}
    folder = save(tmp_path / "c", state, step=1, sharding=Sharding(shards=1))
    (folder / "big.shard-000.pt").write_bytes(b"broken")
    assert list(load(folder, only=["model", "n"])) == ["model", "n"]
    assert refused(folder)
    with pytest.raises(InvalidArgument, match="modle"):
        load(folder, only=["modle"])
    with pytest.raises(InvalidArgument):
        load(folder, only="model")


def test_a_bad_device_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="map_location"):
        load(folder, map_location="gpu")


def test_moving_to_a_device_keeps_ties_types_and_the_rng_on_the_cpu(tmp_path: Path) -> None:
    weight = torch.ones(3)
    state = {
        "m": {
            "a": weight,
            "b": weight,
            "p": nn.Parameter(torch.ones(2)),
            "t": (torch.ones(1), torch.Size([2])),
        },
        "g": torch.Generator(),
    }
    folder = save(tmp_path / "c", state, step=1)
    loaded = load(folder, map_location="meta")
    assert loaded["m"]["a"].device.type == "meta"
    assert type(loaded["m"]["p"]) is nn.Parameter
    assert loaded["m"]["t"][0].device.type == "meta"
    assert loaded["m"]["t"][1] == torch.Size([2])
    assert loaded["rng"]["torch"].device.type == "cpu"
    ckptd.restore_rng_state(loaded["rng"])


def test_a_symlink_to_a_checkpoint_loads(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder)
    assert same(load(tmp_path / "latest"), load(folder))


# --- deleted while it is read (field case 20) --------------------------------------------------------


def test_a_checkpoint_deleted_after_it_was_opened_is_still_read_whole(folder: Path, tmp_path: Path) -> None:
    wanted = {file.name: file.read_bytes() for file in folder.iterdir()}
    with CheckpointReader(str(folder)) as reader:
        folder.rename(tmp_path / ".trash")
        shutil.rmtree(tmp_path / ".trash")
        for name in reader.files:
            assert reader.read(name) == wanted[name]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_checkpoint_deleted_while_it_is_opened_is_gone(
    folder: Path, tmp_path: Path, when: int, monkeypatch: Patch
) -> None:
    real, calls = checkpoint_reader.open_file, [0]

    def deleting(fd: int, name: str, where: str) -> int:
        if calls[0] == when:
            folder.rename(tmp_path / ".trash")
            shutil.rmtree(tmp_path / ".trash")
        calls[0] += 1
        return real(fd, name, where)

    monkeypatch.setattr(checkpoint_reader, "open_file", deleting)
    if when >= len(list(folder.iterdir())) - 1:
        load(folder)
        return
    with pytest.raises(CheckpointGone):
        load(folder)


def test_a_checkpoint_replaced_by_another_while_it_is_opened_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    real = checkpoint_reader.read_index

    def replacing(fd: int, where: str) -> Any:
        index = real(fd, where=where)
        folder.rename(tmp_path / ".trash")
        shutil.copytree(tmp_path / ".trash", folder)
        shutil.rmtree(tmp_path / ".trash")
        return index

    monkeypatch.setattr(checkpoint_reader, "read_index", replacing)
    with pytest.raises(CheckpointGone):
        load(folder)


@pytest.mark.slow
def test_a_reader_against_deletion_sees_a_whole_checkpoint_or_none(
    tmp_path: Path, sharding: Sharding
) -> None:
    master = save(tmp_path / "master", small_state(), step=1, sharding=sharding)
    wanted = load(master)
    target, stop = tmp_path / "step-000000001", threading.Event()

    def churn() -> None:
        number = 0
        while not stop.is_set():
            shutil.copytree(master, tmp_path / ".tmp")
            (tmp_path / ".tmp").rename(target)
            (target).rename(tmp_path / f".trash{number}")
            shutil.rmtree(tmp_path / f".trash{number}")
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    outcomes = {"whole": 0, "gone": 0}
    try:
        for _ in range(400):
            try:
                assert same(load(target), wanted)
                outcomes["whole"] += 1
            except CheckpointGone:
                outcomes["gone"] += 1
    finally:
        stop.set()
        thread.join()
    assert outcomes["gone"] > 0


# --- the reader ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [[10, 3, 5_000_000, 7, 2_000_000, 1], [1_500_000] * 3, [100_000] * 100, [8]]
)
def test_spans_of_all_sizes_are_read_into_place(tmp_path: Path, sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    folder = save(tmp_path / "c", {"t": tensors}, step=1, sharding=Sharding(shards=2))
    assert same(load(folder)["t"], tensors)


def test_a_span_after_a_large_gap_needs_no_large_memory(folder: Path) -> None:
    content = bytearray(3)
    blocks = list(read_blocks.blocks([Span(10**12, memoryview(content))], 10**12 + 3))
    assert all(block.end - block.start < 10**7 for block in blocks if block.spans)


def test_an_index_that_lies_about_a_size_costs_no_memory(folder: Path) -> None:
    index = read_index(folder)
    absurd = {"tensors_bytes": 2**61}
    (folder / "index.json").write_bytes(index_to_bytes(replace(index, **absurd)))
    with pytest.raises(CorruptCheckpoint, match="size"):
        load(folder)


def test_running_out_of_descriptors_is_not_called_corruption(folder: Path, monkeypatch: Patch) -> None:
    def fail(fd: int, name: str, where: str) -> int:
        raise OSError(24, "Too many open files", name)

    monkeypatch.setattr(checkpoint_reader, "open_file", fail)
    with pytest.raises(CkptdError) as caught:
        load(folder)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_no_descriptor_stays_open(folder: Path) -> None:
    gc.collect()  # what other tests have left isn't this one's
    before = len(os.listdir("/proc/self/fd"))
    load(folder)
    (folder / "tensors.json").write_bytes(b"")
    assert refused(folder)
    assert len(os.listdir("/proc/self/fd")) <= before
