"""Field cases 7 and 20: whoever asks or restores, beside a daemon that writes and removes, gets a whole one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import CheckpointGone
from ckptd.link.resume import restore
from ckptd_places import end_daemon, places
from live_daemon import detached, wait_until

__all__ = ["places"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WRITE_S, PATIENCE_S = 2.0, 200.0


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((5000,), float(step)), "counter": step}


def check_loaded(path: Path, step: int) -> None:
    found = ckptd.load(path)
    assert (found["counter"], set(found["weights"].tolist())) == (step, {float(step)})


class Reader(threading.Thread):
    """Asks every millisecond until it is told to stop; what it raised is in `error`."""

    def __init__(self, ask: Callable[[], int | None]) -> None:
        super().__init__(daemon=True)
        self.ask, self.answers, self.error = ask, 0, BaseException()
        self.failed = False
        self.stop = threading.Event()

    def run(self) -> None:
        newest = 0
        try:
            while not self.stop.wait(0.001):
                step = self.ask()
                assert step is not None, "it said none"
                assert step >= newest, "it went back"
                newest = step
                self.answers += 1
        except BaseException as error:
            self.failed, self.error = True, error


#: Whether each reader has got so many answers, or there is no use in more of them.
Enough = Callable[[int], bool]


def read_while(write: Callable[[Enough], None], *asks: Callable[[], int | None]) -> list[int]:
    """Ask from threads of their own while `write` runs; how many answers each got."""
    readers = [Reader(ask) for ask in asks]
    ends = time.monotonic() + PATIENCE_S

    def enough(count: int) -> bool:
        over = time.monotonic() > ends or any(reader.failed for reader in readers)
        return over or min(reader.answers for reader in readers) >= count

    for reader in readers:
        reader.start()
    try:
        write(enough)
    finally:
        for reader in readers:
            reader.stop.set()
        for reader in readers:
            reader.join(60)
    for reader in readers:
        if reader.failed:
            raise reader.error
    return [reader.answers for reader in readers]


def latest_that_loads(root: Path, **how: Any) -> Callable[[], int | None]:
    """Ask for the latest and load it; only what retention took meanwhile may be gone, for a newer one."""

    def ask() -> int | None:
        found = ckptd.latest_valid(root, **how)
        while found is not None:
            try:
                check_loaded(found.path, found.step)
                return found.step
            except CheckpointGone:
                newer = ckptd.latest_valid(root, **how)
                assert newer is not None
                assert newer.sequence > found.sequence
                found = newer
        return None

    return ask


def restores(root: Path) -> Callable[[], int | None]:
    """Restore as Client.restore does, and look at every value."""
    opened = Root.for_reading(root)

    def ask() -> int | None:
        state = state_of(0)
        resumed = restore(opened, "default", state, run_id="", step=None, source=None, only=None, strict=True)
        if resumed is None:
            return None
        assert (state["counter"], set(state["weights"].tolist())) == (resumed.step, {float(resumed.step)})
        return resumed.step

    return ask


@pytest.mark.parametrize("keep", [1, 2])
def test_beside_a_daemon_that_writes_and_removes_every_answer_restores_and_is_never_none(
    root: Path, keep: int
) -> None:
    """Field cases 7 and 20: `latest`, `latest --no-wait` and restore, for as long as it takes."""
    with detached(root, "--keep-last", str(keep)), ckptd.Client(root, daemon="attach") as client:
        client.snapshot(1, state_of(1)).wait("verified", timeout_s=60)
        written = [1]

        def write(enough: Enough) -> None:
            end = time.monotonic() + WRITE_S
            while time.monotonic() < end or not enough(21) or len(written) < 21:
                written.append(written[-1] + 1)
                client.snapshot(written[-1], state_of(written[-1]))
            client.drain(60, verified=True)

        asks = latest_that_loads(root), latest_that_loads(root, wait=False), restores(root)
        answers = read_while(write, *asks)
        assert min(answers) > 20
        # Whoever waits for the proof doesn't wait for retention, and the last of many may be proved at once.
        wait_until(lambda: len(list((root / "default").glob("step-*"))) < 10)


def test_without_a_daemon_every_answer_beside_a_writer_restores_and_is_never_none(root: Path) -> None:
    """Field case 7, daemon="off"; removals without a daemon are in test_latest_beside_writer.py."""
    with ckptd.Client(root, daemon="off") as client:
        client.snapshot(1, state_of(1))

        def write(enough: Enough) -> None:
            step = 1
            while step < 59 or not enough(6):
                step += 1
                client.snapshot(step, state_of(step))

        answers = read_while(write, latest_that_loads(root), restores(root))
    assert min(answers) > 5


def test_two_hundred_restores_against_retention_are_whole_each(root: Path) -> None:
    """Field case 20: success, or a clean "gone" with a newer valid one to go to."""
    with detached(root, "--keep-last", "1"), ckptd.Client(root, daemon="attach") as client:
        client.snapshot(1, state_of(1)).wait("verified", timeout_s=60)

        def write(enough: Enough) -> None:
            step = 1
            while not enough(200):
                step += 1
                client.snapshot(step, state_of(step))

        assert min(read_while(write, restores(root))) >= 200
    end_daemon(root)
