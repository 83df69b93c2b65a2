"""Differential fuzzing: what our writer makes and what torch.save makes of the same payload.

CKPTD_FUZZ_EXAMPLES=20000 looks longer, and elsewhere each time; without it the same few payloads are tried
every time, so that CI is the same everywhere.
"""

from __future__ import annotations

import io
import os
import random
import struct
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_payload import (
    SAVED_DTYPES,
    Payload,
    dense_tensors,
    differentiable,
    exact,
    models,
    of_bytes,
    payloads,
    tensors_in,
    ties,
    unpacked,
)
from ckptd.errors import UnstorableState
from ckptd.format.archive import ArchivePlan, plan_archive
from ckptd.format.archive_check import check_archive
from ckptd.format.pickle_emit import emit
from ckptd.format.plan import plan_checkpoint
from ckptd.snapshot.descriptor import Descriptor, Sharding
from ckptd.snapshot.descriptor_codec import decode, encode
from plain_state import described, joined, write

EXAMPLES = os.environ.get("CKPTD_FUZZ_EXAMPLES")
fuzz = settings(
    max_examples=int(EXAMPLES or 120),
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300 if EXAMPLES is None else 0),
    # of complex32, that its operators aren't done; of the payload's own device, that there is none
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def ours(payload: dict[Any, Any]) -> tuple[ArchivePlan, Descriptor, bytes]:
    """The plan of one archive of payload, through a descriptor as it travels, and its bytes."""
    descriptor, data = described(payload)
    descriptor = decode(encode(descriptor))
    plan = plan_archive(descriptor.state, descriptor.tensors, name="ours")
    return plan, descriptor, joined(plan.segments, data)


def load(source: Any, **options: Any) -> Any:
    return torch.load(source, weights_only=True, **options)


@fuzz
@given(payloads())
def test_torch_reads_our_file_and_its_own_as_the_same_payload(folder: Path, payload: Payload) -> None:
    live = unpacked(payload.state)
    _, _, content = ours(payload.state)
    (folder / "ours.pt").write_bytes(content)
    wanted, tied = exact(live), ties(live)
    if not any(map(only_ours_loads, tensors_in(live))):
        torch.save(live, folder / "theirs.pt")
        theirs = load(folder / "theirs.pt")
        assert (exact(theirs), ties(theirs)) == (wanted, tied), "the oracle itself is off"
        check_archive((folder / "theirs.pt").read_bytes(), "theirs", ours=False)
    check_archive(content, "ours", ours=True)
    for found in (
        load(folder / "ours.pt"),
        load(folder / "ours.pt", mmap=True),
        load(io.BytesIO(content)),
        load(folder / "ours.pt", map_location="cpu"),
        load(io.BytesIO(content), map_location=lambda storage, place: storage),
    ):
        assert exact(found) == wanted
        assert ties(found) == tied
    nowhere = load(folder / "ours.pt", map_location="meta")
    assert exact(nowhere, bits=False) == exact(live, bits=False)
    assert {tensor.device.type for tensor in tensors_in(nowhere)} <= {"meta"}


def only_ours_loads(tensor: torch.Tensor) -> bool:
    """torch.save writes it, and torch.load fails on that: a plain tensor of a newer dtype that requires grad."""
    older = tensor.dtype in torch.storage._dtype_to_storage_type_map()
    return tensor.requires_grad and not older and type(tensor) is torch.Tensor


@pytest.mark.parametrize("dtype", SAVED_DTYPES, ids=str)
def test_every_dtype_in_every_layout_and_as_a_parameter_is_read_as_it_was(
    dtype: torch.dtype, folder: Path
) -> None:
    raw = random.Random(0).randbytes(24 * dtype.itemsize)
    fresh = partial(of_bytes, raw, dtype)  # each layout its own memory: what is tied looks alike
    layouts = {
        "C": fresh((2, 3, 4)),
        "permuted": fresh((2, 3, 4)).permute(2, 0, 1),
        "transposed": fresh((4, 6)).t(),
        "0-dim": of_bytes(raw[: dtype.itemsize], dtype, ()),
        "empty": of_bytes(b"", dtype, (0, 3)),
        "large": of_bytes(raw * 4096, dtype, (24, 4096)).t(),
    }
    state: dict[str, Any] = {}
    for name, tensor in layouts.items():
        for required in {False, differentiable(dtype)}:
            state[f"{name} {required}"] = tensor.detach().requires_grad_(required)
            state[f"{name} parameter {required}"] = torch.nn.Parameter(tensor, requires_grad=required)
    _, _, content = ours(state)
    check_archive(content, "ours", ours=True)
    (folder / "ours.pt").write_bytes(content)
    for found in (load(io.BytesIO(content)), load(folder / "ours.pt", mmap=True)):
        assert exact(found) == exact(state)
        assert ties(found) == ties(state)


@fuzz
@given(payloads())
def test_what_torch_loaded_from_our_file_is_written_to_the_same_file_again(payload: Payload) -> None:
    _, _, content = ours(unpacked(payload.state))
    _, _, again = ours(load(io.BytesIO(content)))
    assert again == content


@fuzz
@given(payloads())
def test_other_zip_readers_find_the_records_where_the_plan_says(payload: Payload) -> None:
    plan, descriptor, content = ours(payload.state)
    archive = zipfile.ZipFile(io.BytesIO(content))
    names = [info.filename.removeprefix("ours/") for info in archive.infolist()]
    storages = [f"data/{number}" for number in range(len(names) - 4)]
    assert names == ["data.pkl", "byteorder", *storages, "version", ".data/serialization_id"]
    end = 0
    for info in archive.infolist():
        name_length, extra_length = struct.unpack_from("<2H", content, info.header_offset + 26)
        start = info.header_offset + 30 + name_length + extra_length
        assert (info.header_offset, info.compress_type, info.flag_bits) == (end, zipfile.ZIP_STORED, 0x800)
        assert info.compress_size == info.file_size
        assert start % (4096 if info.file_size >= 65536 else 64) == 0
        end = start + info.file_size
        if not info.filename.startswith("ours/data/"):
            assert zlib.crc32(content[start:end]) == info.CRC
        elif info.file_size:
            assert start in plan.offsets.values()
    assert archive.start_dir == end
    assert plan.size == len(content)
    assert set(plan.offsets) == set(range(len(descriptor.tensors)))


SHARDINGS = st.builds(
    Sharding, by=st.sampled_from(["size", "round-robin"]), shards=st.integers(1, 4)
) | st.just(Sharding(by="param-group", shards=3))


@fuzz
@given(models(), SHARDINGS)
def test_shards_merge_into_the_state_dict_as_the_readme_says(
    folder: Path, drawn: Payload, sharding: Sharding
) -> None:
    model = drawn.state
    descriptor, data = described({"model": model}, sharding)
    for old in folder.glob("*.pt"):
        old.unlink()
    write(plan_checkpoint(decode(encode(descriptor))), data, folder)
    sd: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model.shard-*.pt")):
        shard = load(file)
        check_archive(file.read_bytes(), file.name, ours=True)
        assert list(shard["tensors"]) == shard["keys"]
        assert not set(sd) & set(shard["tensors"])
        sd.update(shard["tensors"])
    if not sd:  # nothing in it has bytes: it has no shards
        sd = load(folder / "meta.pt")["model"]
    sd = {key: sd[key] for key in model}
    assert exact(sd) == exact(model)
    assert ties(sd) == ties(model)


def test_every_dtype_torch_saves_is_among_the_fuzzed_and_each_tensor_layout_too() -> None:
    """Or the suite above would pass by never drawing them."""
    seen: set[Any] = set()
    layouts: set[str] = set()

    @settings(fuzz, max_examples=600, derandomize=True)
    @given(dense_tensors())
    def draw(tensor: torch.Tensor) -> None:
        seen.add(tensor.dtype)
        layouts.add("C" if tensor.is_contiguous() else "permuted")
        layouts.add("0-dim" if tensor.dim() == 0 else "empty" if tensor.numel() == 0 else "some")
        layouts.add(f"{type(tensor).__name__} {tensor.requires_grad}")

    draw()
    assert seen == set(SAVED_DTYPES)
    kinds = {f"{kind} {grad}" for kind in ("Tensor", "Parameter") for grad in (True, False)}
    assert layouts == {"C", "permuted", "0-dim", "empty", "some"} | kinds


def test_an_integer_longer_than_the_loader_reads_is_refused_by_the_writer_too() -> None:
    """torch spells it LONG4, which weights_only doesn't know. When this fails, write them: torch reads them now."""
    saved = io.BytesIO()
    torch.save({"n": 2**2040}, saved)
    saved.seek(0)
    with pytest.raises(Exception, match="139"):  # the opcode's number
        load(saved)
    with pytest.raises(UnstorableState, match="integer too long"):
        emit(2**2040, [])


def test_ties_are_seen_by_the_comparison() -> None:
    one = torch.ones(2)
    assert ties([one, one.clone(), one.detach()]) == [0, 1, 0]
    assert exact([one]) != exact([torch.nn.Parameter(one)])
    assert len(list(tensors_in({"a": [one, (one,)]}))) == 2
    with warnings.catch_warnings():
        assert exact(one) != exact(torch.tensor([1.0, -1.0]))
