"""The daemon's proofs of slots that wait."""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import SaveFailed
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.proofs import LIVING_AFTER_S, PROVE_AFTER_S, Proofs
from ckptd_daemon.core.snapshots import Snapshot
from ckptd_daemon.core.worker import Worker
from daemon_parts import new_client_id, places_in, slot_size
from test_pipeline import Rig

CLIENT = new_client_id()


class ProvingRig(Rig):
    """A pipeline whose disk refuses everything, and the proofs beside it."""

    def begin(self) -> None:
        self.prover = Worker("proofs")
        self.proofs = Proofs(self.pipeline, self.pool, self.prover, lambda: self.clock, self.attached)
        self.prover.start()

    def waiting(self, number: int = 1, data: bytes = b"abc") -> tuple[Snapshot, Slot]:
        """A snapshot that was put off: nobody is there to be told, and the disk fails."""
        self.commit.errors.append(SaveFailed("the disk is broken"))
        slot = self.sealed(CLIENT, number, data)
        snapshot = self.accept(slot)
        self.settle()
        assert snapshot.retry_at is not None
        return snapshot, slot

    def prove(self, after_s: float = PROVE_AFTER_S) -> None:
        self.proofs.look()
        self.clock += after_s
        self.proofs.look()
        self.deliver()

    def deliver(self) -> None:
        idle: list[None] = []
        self.prover.submit(lambda: None, lambda _: idle.append(None))
        while not idle:
            select.select([self.prover], [], [], 60)
            self.prover.deliver()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ProvingRig]:
    with places_in(tmp_path) as places:
        made = ProvingRig(places)
        made.begin()
        yield made
        made.proofs.stop()
        made.prover.stop()
        made.disk.worker.stop()
        for slot in made.pool:
            made.pool.remove(slot)
        made.pool.close()


def test_a_snapshot_that_waits_longer_than_a_second_is_proven_once(rig: ProvingRig) -> None:
    _, slot = rig.waiting()
    rig.prove(PROVE_AFTER_S / 2)
    assert slot.proof() is None
    rig.prove(PROVE_AFTER_S / 2)
    proof = slot.proof()
    assert proof is not None
    slot.data[0] ^= 1
    rig.prove()  # what was proven isn't proven again: damage since would be sealed
    assert slot.proof() == proof


def test_while_its_trainer_lives_it_is_left_ten_seconds_to_be_written(rig: ProvingRig) -> None:
    _, slot = rig.waiting()
    rig.connected.add(CLIENT)
    rig.prove(LIVING_AFTER_S * 0.9)
    assert slot.proof() is None
    rig.connected.clear()  # it died: whoever comes next may want it
    rig.prove(0.0)
    assert slot.proof() is not None
    _, other = rig.waiting(2)
    rig.connected.add(CLIENT)
    rig.prove(LIVING_AFTER_S)
    assert other.proof() is not None


def test_the_proof_of_an_earlier_daemon_is_kept(rig: ProvingRig) -> None:
    _, slot = rig.waiting()
    rig.prove()
    proof = slot.proof()
    slot.data[0] ^= 1
    rig.proofs.stop()
    rig.prover.stop()
    rig.begin()
    rig.prove()
    assert slot.proof() == proof is not None


def test_a_snapshot_that_is_written_in_time_is_never_hashed(rig: ProvingRig) -> None:
    slot = rig.sealed(CLIENT, 1)
    rig.accept(slot)
    rig.proofs.look()
    rig.settle()
    rig.prove()
    assert slot.proof() is None


def test_a_slot_that_was_freed_while_it_was_hashed_gets_no_proof(rig: ProvingRig) -> None:
    snapshot, slot = rig.waiting(data=b"x" * 100)
    rig.proofs.look()
    rig.clock += PROVE_AFTER_S
    rig.proofs.look()
    snapshot.retry_at = 0.0
    rig.pipeline.retry()  # written now, before the hash is delivered
    rig.settle()
    rig.deliver()
    assert slot.proof() is None


def test_a_destroyed_header_harms_nobody_else(rig: ProvingRig) -> None:
    _, broken = rig.waiting(1)
    _, whole = rig.waiting(2)
    broken._all[:4096] = bytes(4096)
    rig.prove()
    assert whole.proof() is not None


def test_what_lies_in_no_file_is_not_hashed_for_nobody_can_open_it(rig: ProvingRig) -> None:
    snapshot, slot = rig.waiting()
    private = Slot.anonymous("stream", slot_size(3), client_id=CLIENT, run="default")
    private._all[:] = slot._all[: len(private._all)]
    snapshot.slot = private
    rig.prove()
    assert private.proof() is None
    private.close()
