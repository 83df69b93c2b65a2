"""Where no thread can be started, or memory is short: slower, or said to be so, and never taken for damage."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.verification import check
from ckptd.errors import ReadFailed
from ckptd.tensors import copy_threads
from ckptd.tensors.copy_threads import CopyThreads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((3000,), value), "b": torch.full((5000,), value + 1)}


def saved(folder: Path, shards: int | str = 2) -> Path:
    sharding = ckptd.Sharding(shards=shards) if shards != "auto" else ckptd.Sharding()  # type: ignore[arg-type]
    ckptd.save(folder / "saved", state(1.0), step=1, sharding=sharding)
    return folder / "saved"


def test_a_copy_is_made_by_the_caller_alone(no_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_threads, "PIECE_BYTES", 4096)
    source, target = (
        torch.randint(0, 256, (100_000,), dtype=torch.uint8),
        torch.zeros(100_000, dtype=torch.uint8),
    )
    threads = CopyThreads(3)
    threads.move([(target.data_ptr(), source.data_ptr(), 100_000)], lambda: None)
    assert torch.equal(source, target)
    threads.close()


def test_all_files_are_read_by_the_caller_alone(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = saved(tmp_path)
    request.getfixturevalue("no_threads")
    live = state(0.0)
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        client.restore(live, source=path)
    loaded = ckptd.load(path)
    for name, value in state(1.0).items():
        assert torch.equal(live[name], value) and torch.equal(loaded[name], value)


def test_a_check_that_gets_no_thread_cannot_tell(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = saved(tmp_path)
    request.getfixturevalue("no_threads")
    with pytest.raises(ReadFailed, match="start new thread"):
        check(path)


def test_no_older_checkpoint_is_the_latest_because_the_newest_cannot_be_checked(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with ckptd.Client(tmp_path / "root", daemon="off") as client:
        for step in (1, 2):
            client.snapshot(step, state(float(step)))
    request.getfixturevalue("no_threads")
    with pytest.raises(ReadFailed, match="start new thread"):
        ckptd.latest_valid(tmp_path / "root")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
        ),
        MemoryError(),
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
    ],
)
@pytest.mark.parametrize("shards", ["auto", 2])
def test_a_checkpoint_is_not_corrupt_because_something_is_short_and_none_before_it_takes_its_place(
    tmp_path: Path, error: Exception, shards: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_args: Any, **_options: Any) -> Any:
        raise error

    path, root, live = saved(tmp_path, shards), tmp_path / "root", state(0.0)
    sharding = ckptd.Sharding(shards=shards) if shards != "auto" else ckptd.Sharding()  # type: ignore[arg-type]
    with ckptd.Client(root, daemon="off", sharding=sharding) as client:
        for step in (1, 2):
            client.snapshot(step, state(float(step)))
        with monkeypatch.context() as short:
            short.setattr(torch, "load", load)
            with pytest.raises(ReadFailed):
                ckptd.load(path)
            with pytest.raises(ReadFailed):
                client.restore(live)
        resumed = client.restore(live)
    assert resumed is not None and resumed.step == 2
    assert torch.equal(live["a"], state(2.0)["a"])
