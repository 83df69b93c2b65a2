"""A sealed slot read by another process than the one that filled it, and the proof that its bytes are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from pipes import waits_for_the_pipe

import pytest

from ckptd.errors import ProtocolError
from ckptd.limits import MIB
from ckptd.snapshot.sealed_slot import SealedSlot, sealed_slots
from ckptd.snapshot.slot_proof import PROOF_AT, Proof, hash_of
from ckptd.snapshot.slots import HEADER_BYTES, Slot, needed_bytes

CLIENT = "ab" * 16
DATA = bytes(range(251)) * (9 * MIB // 251)


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = Slot.create(tmp_path / "slot-a", needed_bytes(len(DATA), 100), client_id=CLIENT, run="gpt")
    fill(made, 1)
    yield made
    made.close()


def fill(slot: Slot, snapshot: int) -> None:
    slot.begin(CLIENT, "gpt", snapshot)
    slot.data[: len(DATA)] = DATA
    slot.seal(b"descriptor", len(DATA))


def prove(slot: Slot) -> Proof:
    header = slot.header()
    proof = Proof(header.generation, len(DATA), hash_of(lambda at, n: slot.data[at : at + n], len(DATA)))
    slot.prove(proof)
    return proof


def test_what_was_sealed_is_read_and_nothing_can_be_written(slot: Slot) -> None:
    with SealedSlot(slot.path) as sealed:
        assert sealed.header == slot.header()
        assert sealed.descriptor() == b"descriptor"
        assert sealed.read(7, 5 * MIB) == DATA[7 : 7 + 5 * MIB]
        with pytest.raises(OSError):
            os.write(sealed._fd, b"x")


def test_the_hash_is_the_same_by_one_thread_and_by_many_and_of_other_bytes_another(slot: Slot) -> None:
    proof = prove(slot)
    with SealedSlot(slot.path) as sealed:
        assert sealed.is_proven()
        sealed.check(threads=3)
        assert hash_of(sealed.read, len(DATA), threads=2) == proof.sha256
        assert hash_of(sealed.read, len(DATA) - 1) != proof.sha256
    assert hash_of(lambda at, n: bytearray(), 0) == hash_of(lambda at, n: bytearray(), 0, threads=2)


@pytest.mark.parametrize("at", [0, 4 * MIB - 1, 4 * MIB, len(DATA) - 1])
def test_one_flipped_bit_is_found_by_its_hash(slot: Slot, at: int) -> None:
    prove(slot)
    slot.data[at] ^= 1
    with SealedSlot(slot.path) as sealed, pytest.raises(ProtocolError, match="tensors' bytes in the slot"):
        sealed.check(threads=2)


def test_without_a_proof_nothing_is_proven(slot: Slot) -> None:
    with SealedSlot(slot.path) as sealed:
        assert not sealed.is_proven()
        with pytest.raises(ProtocolError, match="none recorded"):
            sealed.check(threads=1)


def test_a_proof_counts_for_the_generation_whose_bytes_were_hashed(slot: Slot) -> None:
    proof = prove(slot)
    assert slot.proof() == proof
    slot.release()
    fill(slot, 2)
    assert slot.proof() is None
    slot.prove(proof)  # it comes too late
    assert slot.proof() is None
    with SealedSlot(slot.path) as sealed:
        assert not sealed.is_proven()


@pytest.mark.parametrize("at", [0, 10, 20, 40, 56])  # in each field
def test_a_torn_proof_is_none_and_the_header_is_whole(slot: Slot, at: int) -> None:
    prove(slot)
    with slot.path.open("r+b") as file:
        file.seek(PROOF_AT + at)
        file.write(b"\xff\xff")
    assert slot.proof() is None
    assert slot.header().snapshot == 1
    prove(slot)
    slot.mark_writing(3)
    slot.accept(4)
    assert slot.proof() is not None  # both copies of the header were written, beside it


def test_a_slot_freed_or_unlinked_still_holds_its_bytes_and_one_filled_again_does_not(slot: Slot) -> None:
    with SealedSlot(slot.path) as sealed:
        slot.accept(3)
        slot.mark_writing(3)
        assert sealed.holds()
        slot.release()
        slot.path.unlink()
        assert sealed.holds()
        assert sealed.read(0, 100) == DATA[:100]
        fill(slot, 2)
        assert not sealed.holds()


def test_a_file_that_was_cut_short_is_an_error_and_no_bus_error(slot: Slot) -> None:
    with SealedSlot(slot.path) as sealed:
        os.truncate(slot.path, HEADER_BYTES + 100)
        with pytest.raises(ProtocolError, match="cut short"):
            sealed.read(0, len(DATA))
        os.truncate(slot.path, 0)
        assert not sealed.holds()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not waits_for_the_pipe(tmp_path / "pipe", lambda: SealedSlot(tmp_path / "pipe"))
    with pytest.raises(ProtocolError, match="not a regular file"):
        SealedSlot(tmp_path / "pipe")


def test_a_changed_descriptor_is_refused(slot: Slot) -> None:
    slot.data[needed_bytes(len(DATA), 0) - HEADER_BYTES] ^= 1
    with SealedSlot(slot.path) as sealed, pytest.raises(ProtocolError, match="isn't what was sealed"):
        sealed.descriptor()


def test_only_what_holds_a_snapshot_is_opened(tmp_path: Path, slot: Slot) -> None:
    Slot.create(tmp_path / "slot-free", needed_bytes(1, 1)).close()
    (tmp_path / "link").symlink_to(slot.path)
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "noise").write_bytes(os.urandom(8192))
    (tmp_path / "noise").chmod(0o600)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for run, names in (("gpt", ["slot-a"]), (None, ["slot-a"]), ("other", [])):
        found = list(sealed_slots(tmp_path, run))
        assert [sealed.path.name for sealed in found] == names
        for sealed in found:
            sealed.close()
    assert list(sealed_slots(tmp_path / "nowhere")) == []
