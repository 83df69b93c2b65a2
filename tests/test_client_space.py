"""A full disk and a small /dev/shm, for real: file systems of a few MiB. Needs the right to mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.errors import CheckpointWarning, NoSpace, SharedMemoryTooSmall
from ckptd_places import end_daemon, places

__all__ = ["places"]

pytestmark = [pytest.mark.privileged, pytest.mark.slow]

MIB = 1024 * 1024


@contextmanager
def small_filesystem(path: Path, size: int) -> Iterator[None]:
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"can't mount a tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        end_daemon(path)
        subprocess.run(["umount", "-l", str(path)], check=True)


def names_in(root: Path) -> set[str]:
    """What is in the run's folder, but for its index, which comes after the acknowledgement."""
    found = {path.name for path in (root / "default").iterdir() if not path.name.startswith(".tmp-0-")}
    return found - {"index.json", "recent.json", "newest.json"}


def state_of(value: float, mib: int) -> dict[str, Any]:
    return {"weights": torch.full((mib * MIB // 4,), value)}


def test_a_64_mb_shm_and_a_200_mb_state_is_streamed_byte_for_byte_and_says_why(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shm = tmp_path / "shm"
    with small_filesystem(shm, 64 * MIB):
        monkeypatch.setenv("CKPTD_SHM_DIR", str(shm))
        state = {"weights": torch.randint(-(2**31), 2**31, (50 * MIB,), dtype=torch.int32)}
        with ckptd.Client(places) as client:
            client.reserve(state)
            client.snapshot(1, state).wait(timeout_s=100)
            assert list(shm.rglob("slot-*")) == []
            assert client.status()["runs"][0]["client"]["transport"] == "stream"
        assert torch.equal(ckptd.load(places / "default" / "step-000000001")["weights"], state["weights"])
        (said,) = [one.getMessage() for one in caplog.records if "transport.stream" in one.getMessage()]
        assert str(shm) in said and "--shm-size" in said
        end_daemon(places)


def test_where_streaming_is_not_wanted_it_is_a_clear_error_before_copying(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = tmp_path / "shm"
    with small_filesystem(shm, 64 * MIB):
        monkeypatch.setenv("CKPTD_SHM_DIR", str(shm))
        state = state_of(1.0, 200)
        with ckptd.Client(places, transport="shm") as client:
            with pytest.raises(SharedMemoryTooSmall, match=r'--shm-size.*slots=1.*daemon="off"'):
                client.snapshot(1, state)
            with pytest.raises(SharedMemoryTooSmall):
                client.restore(state)
            assert list(shm.rglob("slot-*")) == []
            # what fits is saved all the same
            assert client.snapshot(2, state_of(2.0, 4)).wait(timeout_s=60).committed
        with ckptd.Client(places, slots=1, daemon="auto") as client:
            assert client.snapshot(3, state_of(3.0, 40)).wait(timeout_s=60).committed
        end_daemon(places)


def test_in_another_mount_namespace_it_streams_and_the_daemon_keeps_no_slots(
    places: Path, tmp_path: Path
) -> None:
    shm = os.environ["CKPTD_SHM_DIR"]
    with ckptd.Client(places, run="other"):  # the daemon starts in this namespace
        script = tmp_path / "train.py"
        script.write_text(
            "import logging, sys, torch, ckptd\n"
            "logging.basicConfig(level=logging.WARNING)\n"
            "client = ckptd.Client(sys.argv[1])\n"
            "ticket = client.snapshot(1, {'weights': torch.arange(5_000_000)})\n"
            "print(client.status()['runs'][0]['slots'])\n"  # and it ends without close()
        )
        run = f"mount -t tmpfs tmpfs {shm} && exec {sys.executable} {script} {places}"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", run], capture_output=True, text=True, check=False, timeout=250
        )
        if "unshare" in done.stderr or "mount:" in done.stderr:
            pytest.skip(f"no mount namespace: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        assert "can't be opened here" in done.stderr and "slot-" not in done.stdout
    loaded = ckptd.load(places / "default" / "step-000000001")
    assert torch.equal(loaded["weights"], torch.arange(5_000_000))
    assert list(Path(shm).rglob("slot-*")) == []


def test_slots_that_grow_get_the_memory_of_those_they_replace(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm = tmp_path / "shm"
    with small_filesystem(shm, 128 * MIB):
        monkeypatch.setenv("CKPTD_SHM_DIR", str(shm))
        with ckptd.Client(places) as client:
            client.snapshot(1, state_of(1.0, 20)).wait(timeout_s=60)
            client.snapshot(2, state_of(2.0, 50)).wait(timeout_s=60)
            client.snapshot(3, state_of(3.0, 50)).wait(timeout_s=60)
        end_daemon(places)


def test_on_a_full_disk_training_goes_on_with_warnings_and_saving_resumes_by_itself(
    places: Path, tmp_path: Path
) -> None:
    root = tmp_path / "disk"
    with small_filesystem(root, 24 * MIB):
        with ckptd.Client(root) as client:
            first = client.snapshot(1, state_of(1.0, 10)).wait(timeout_s=60)
            assert first.path is not None
            before = names_in(root)
            full = root / "somebody-elses"
            full.write_bytes(bytes(6 * MIB))
            ticket = client.snapshot(2, state_of(2.0, 10))
            with pytest.warns(CheckpointWarning, match="step 2 was not saved"):
                client.wait(60)
            assert ticket.state == "failed"
            assert isinstance(ticket.error, NoSpace)
            assert names_in(root) == before
            latest = client.latest()
            assert latest is not None
            assert latest.path == first.path
            full.unlink()
            assert client.snapshot(3, state_of(3.0, 10)).wait(timeout_s=60).committed
        assert torch.equal(
            ckptd.load(root / "default" / "step-000000003")["weights"], state_of(3.0, 10)["weights"]
        )


def test_on_a_full_disk_without_a_daemon_it_is_the_same(places: Path, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    with small_filesystem(root, 24 * MIB), ckptd.Client(root, daemon="off") as client:
        client.snapshot(1, state_of(1.0, 10))
        with pytest.warns(CheckpointWarning, match="step 2 was not saved"):
            ticket = client.snapshot(2, state_of(2.0, 20))
        with pytest.raises(NoSpace):
            ticket.wait()
        assert client.snapshot(3, state_of(3.0, 4)).committed
