"""A slot read as the checkpoint it is to become: the same files byte for byte, whatever the daemon does meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.disk.checkpoint_reader import CheckpointReader
from ckptd.disk.commit import commit_snapshot
from ckptd.disk.reader import Span
from ckptd.disk.slot_reader import SlotReader
from ckptd.errors import CorruptCheckpoint
from ckptd.link.earlier import accepted_in
from ckptd.names import META_FILE, TABLE_FILE
from ckptd.snapshot.descriptor import Descriptor, Sharding
from ckptd.snapshot.descriptor_codec import encode
from ckptd.snapshot.sealed_slot import SealedSlot
from ckptd.snapshot.slot_proof import Proof, hash_of
from ckptd.snapshot.slots import Slot, needed_bytes
from ckptd.snapshot.values import TensorRef
from snapshots import RUN_ID, Writer, data_for, descriptor, spec

BIG = (
    300_000,
    5,
    70_000,
    1,
)  #: elements: over a page boundary, under it, and over the alignment of large tensors


def large(step: int, **changes: Any) -> Descriptor:
    """Tensors of two components, a tied and an empty one among them."""
    specs, at = [], 0
    for number, count in enumerate(BIG):
        specs.append(spec(("model", f"w{number}"), "uint8", 1, (count,), at))
        at += -(-count // 4096) * 4096
    specs.append(msgspec.structs.replace(specs[0], path=("optimizer", "tied"), alias_of=0))
    specs.append(spec(("optimizer", "empty"), "float32", 4, (0,), 0))
    state = {
        "model": {f"w{number}": TensorRef(number) for number in range(len(BIG))},
        "optimizer": {"tied": TensorRef(len(BIG)), "empty": TensorRef(len(BIG) + 1)},
        "train": {"step": step},
    }
    return descriptor(step, tensors=tuple(specs), state=state, data_bytes=at, **changes)


def sealed(path: Path, d: Descriptor, data: bytes) -> Slot:
    slot = Slot.create(path, needed_bytes(len(data), 64 * 1024), client_id=d.client_id, run=d.run)
    slot.begin(d.client_id, d.run, d.snapshot)
    slot.data[: len(data)] = data
    slot.seal(encode(d), len(data))
    slot.accept(5)
    prove(slot)
    return slot


def prove(slot: Slot) -> None:
    header = slot.header()
    digest = hash_of(lambda at, count: slot.data[at : at + count], header.data_bytes)
    slot.prove(Proof(header.generation, header.data_bytes, digest))


def reader_of(slot: SealedSlot, **how: Any) -> SlotReader:
    return SlotReader(slot, accepted_in(slot).descriptor, run_id=RUN_ID, sequence=5, **how)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    d = large(7, sharding=Sharding(shards=2), metrics={"loss": 0.5})
    made = sealed(tmp_path / "slot", d, random.Random(1).randbytes(d.data_bytes))
    yield made
    made.close()


@pytest.mark.parametrize(
    "d",
    [
        descriptor(3), large(3), large(3, sharding=Sharding(shards=2)),
        large(3, sharding=Sharding(by="round-robin", shards=3)), large(3, sharding=Sharding(by="param-group")),
        descriptor(3, tensors=(), state={"train": {}}, data_bytes=0),
    ],
    ids=["single", "single, large", "by size", "round-robin", "param-group", "no tensors"],
)  # fmt: skip
def test_every_file_is_the_one_that_is_committed(tmp_path: Path, d: Descriptor) -> None:
    data = random.Random(3).randbytes(d.data_bytes)
    slot = sealed(tmp_path / "slot", d, data)
    writer = Writer(tmp_path / "root")
    done = commit_snapshot(writer.run_dir, d, memoryview(data), writer.position(d))
    with CheckpointReader(str(done.path)) as disk, SealedSlot(slot.path) as held:
        memory = reader_of(held)
        assert memory.files == disk.files
        for name in disk.files:
            assert memory.read(name) == disk.read(name), name
        unhashed = tuple(replace(shard, sha256="") for shard in disk.index.shards)
        same = replace(
            disk.index, shards=unhashed, sequence=5, parent=None, lineage=((5, 5),), index_sha256="",
            meta_sha256=None, tensors_sha256="",
        )  # fmt: skip
        assert memory.index == same
    slot.close()


def test_spans_of_any_place_and_length_are_cut_out(slot: Slot) -> None:
    rng = random.Random(2)
    with SealedSlot(slot.path) as held:
        reader = reader_of(held)
        for name in reader.files:
            whole = reader.read(name)
            for _ in range(20):
                first, end, second, last = sorted(rng.sample(range(len(whole) + 1), 4))
                into = bytearray(end - first), bytearray(last - second)
                told: list[str] = []
                begun = Span(first, memoryview(into[0]), partial(told.append, "begins"))
                done = Span(second, memoryview(into[1]), None, partial(told.append, "done"))
                reader.read_into(name, [begun, done])
                assert (into[0], into[1]) == (whole[first:end], whole[second:last])
                assert told == ["begins", "done"]
            with pytest.raises(CorruptCheckpoint, match="beyond the end"):
                reader.peek_into(name, [Span(len(whole) - 1, memoryview(bytearray(2)))])


def test_the_components_that_are_asked_for_are_read_alone(slot: Slot) -> None:
    with SealedSlot(slot.path) as held:
        for name in ("model", "optimizer"):
            files = reader_of(held, only=[name]).files
            assert files[:2] == (TABLE_FILE, META_FILE) and len(files) > 2
            assert all(file.startswith(name) for file in files[2:])


def test_one_flipped_bit_anywhere_in_the_data_keeps_all_of_it_from_being_read(slot: Slot) -> None:
    slot.data[300_001] ^= 1
    with SealedSlot(slot.path) as held, pytest.raises(CorruptCheckpoint, match="aren't what was sealed"):
        reader_of(held)


def test_what_nobody_has_proven_is_not_read(tmp_path: Path) -> None:
    d = descriptor(3)
    slot = sealed(tmp_path / "slot", d, bytes(data_for(3)))
    slot.release()
    slot.begin(d.client_id, d.run, d.snapshot)
    slot.seal(encode(d), d.data_bytes)
    with SealedSlot(slot.path) as held, pytest.raises(CorruptCheckpoint, match="sealed"):
        reader_of(held)
    slot.close()


@pytest.mark.parametrize("then", ["written and removed", "filled again"])
def test_a_daemon_that_is_done_with_the_slot_in_mid_read_harms_nothing(tmp_path: Path, then: str) -> None:
    """200 rounds: either all bytes are those of the snapshot, or it is known that they may not be."""
    d = descriptor(3)
    data = {snapshot: random.Random(snapshot).randbytes(d.data_bytes) for snapshot in range(201)}
    whole = 0
    for snapshot in range(1, 201):
        slot = sealed(tmp_path / f"slot-{snapshot}", replace(d, snapshot=snapshot), data[snapshot])
        with SealedSlot(slot.path) as held:
            reader = reader_of(held)
            daemon = threading.Thread(target=finish, args=(slot, then, data[0]))
            daemon.start()
            seen = [reader.read(name) for name in reader.files]
            holds = held.holds()
            daemon.join()
            assert then == "filled again" or holds
            if holds:
                whole += 1
                assert data[snapshot][:256] in seen[1]
        slot.close()
    assert whole == 200 or then == "filled again"


def finish(slot: Slot, then: str, other: bytes) -> None:
    slot.mark_writing(5)
    slot.release()
    if then == "filled again":
        slot.begin("cd" * 16, "default", 1000)
        slot.data[: len(other)] = other
    slot.path.unlink()
