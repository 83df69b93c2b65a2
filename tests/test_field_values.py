"""Field cases 27 and 36 end to end: odd values through slot and daemon, and workers beside an open client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import ckptd
from ckptd_places import daemon_of, places
from dead_workers import deaf_to_children
from round_trip import LAYOUT_IDS, LAYOUTS, same
from test_capture import VALUES

__all__ = ["deaf_to_children", "places"]

pytestmark = pytest.mark.slow


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


@pytest.mark.parametrize("sharding", LAYOUTS, ids=LAYOUT_IDS)
def test_every_odd_key_and_value_comes_back_exactly_by_load_and_by_restore(
    root: Path, sharding: ckptd.Sharding
) -> None:
    """Field case 27: in value and type, through the slot, the daemon and the disk."""
    state = {"values": VALUES, "tensors": {name: torch.ones(2) for name in ("a.b", "a/b", "../x", "k" * 300)}}
    with ckptd.Client(root, sharding=sharding) as client:
        path = client.snapshot(1, state).wait("verified", timeout_s=60).path
        assert path is not None
        assert same(ckptd.load(path)["values"], VALUES)
        live: dict[str, Any] = {"values": {}, "tensors": {name: torch.zeros(2) for name in state["tensors"]}}
        assert client.restore(live) is not None
        assert same(live, state)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


@pytest.mark.usefixtures("deaf_to_children")
@pytest.mark.parametrize("killed", [False, True], ids=["ends by itself", "killed"])
def test_the_end_of_dataloader_workers_harms_neither_client_nor_daemon(root: Path, killed: bool) -> None:
    """Field case 36: workers forked from an open client, with a snapshot in flight, end or are killed."""
    state = {"weights": torch.arange(1000.0)}
    with ckptd.Client(root) as client:
        client.reserve(state)
        daemon = daemon_of(root)
        for epoch in range(3):
            batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=2))
            for batch in range(3):
                next(batches)
                client.snapshot(10 * epoch + batch, state)
            if killed:
                for worker in batches._workers:
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.join()
                with pytest.raises(RuntimeError, match="worker"):
                    list(batches)
            del batches  # ends the workers
            client.snapshot(10 * epoch + 9, state).wait("verified", timeout_s=60)
        assert client.drain(30, verified=True) == 0
        assert daemon_of(root) == daemon
        found = client.latest()
        assert found is not None
        assert (found.step, found.sequence, found.passed_over) == (29, 12, ())
