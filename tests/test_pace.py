"""The lowest priority for what nobody waits for, and none of it for what somebody does, also in the middle."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk import read_ahead, read_buffers, verification
from ckptd.disk.crew import do_all
from ckptd.disk.medium import hash_file, hashing
from ckptd.disk.priority import LOWEST, Urgency
from ckptd.disk.rootdir import Root
from ckptd.errors import TimedOut
from ckptd.link import wire
from ckptd_daemon.verify import pace, verifier, verifier_process
from ckptd_daemon.verify.backlog import Job
from ckptd_daemon.verify.pace import Pace
from ckptd_daemon.verify.verifier import VerifierLoop
from ckptd_daemon.verify.verifier_lines import Hurry, Line, Verdict, Writing, from_line
from ckptd_daemon.verify.verifier_process import Verifier
from fake_daemon import FakeDaemon, wait_until
from made_series import Made

OURS = os.getpriority(os.PRIO_PROCESS, 0)
SECTOR = 4096


def nice() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "root")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A file of eight blocks."""
    monkeypatch.setattr(read_buffers, "BUFFER_BYTES", SECTOR)
    monkeypatch.setattr(read_ahead, "BUFFER_BYTES", SECTOR)
    (tmp_path / "large").write_bytes(bytes(8 * SECTOR))
    fd = os.open(tmp_path / "large", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_the_rest_of_a_file_is_read_and_hashed_at_normal_priority_once_somebody_waits(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgency = Urgency(False)
    reads: list[int] = []
    hashes: list[int] = []
    read = os.preadv

    def reading(*args: Any) -> int:
        reads.append(nice())
        return read(*args)

    def hashed(_count: int) -> None:
        hashes.append(nice())
        if len(hashes) == 3:
            urgency.set(True)

    monkeypatch.setattr(os, "preadv", reading)
    ((sha256, count, _how),) = do_all([hashing(large, uncached=False, progress=hashed)], urgency, name="t")
    assert (sha256, count) == (hash_file(large, uncached=False)[0], 8 * SECTOR)
    assert hashes == [LOWEST] * 3 + [OURS] * 5
    assert reads[:8] == [LOWEST] * 4 + [OURS] * 4  # one block ahead


@pytest.mark.parametrize("urgent", [False, True])
def test_all_of_a_check_is_done_at_the_priority_it_is_due(
    made: Made, urgent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made.commit(1, shards=3).path
    seen: list[int] = []

    def noted(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        seen.append(nice())
        return real(*args, **more)

    for name in ("read_index", "table_from_bytes"):
        monkeypatch.setattr(verification, name, partial(noted, getattr(verification, name)))
    report = verification.check(path, progress=lambda _count: seen.append(nice()), urgency=Urgency(urgent))
    assert report.ok
    assert seen == [OURS if urgent else LOWEST] * len(seen)
    assert len(seen) == 5  # the index, three files, the table


def test_the_verifier_checks_at_the_lowest_priority_until_its_parent_says_that_somebody_waits(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = made.commit(1).name
    seen: list[int] = []
    sent: list[Line] = []
    noted = partial(verification.check, progress=lambda _count: seen.append(nice()))
    monkeypatch.setattr(verifier, "check", noted)
    loop = VerifierLoop(made.root.path, sent.append, rescan_s=600, poll_s=600, settle_s=1)  # type: ignore[arg-type]
    for now, due in ((False, LOWEST), (True, OURS), (False, LOWEST)):
        loop.heed(Hurry(now))
        loop._check(Job("r", name, asked=True))
        assert set(seen) == {due}
        seen.clear()
    assert [line.report.ok for line in sent if isinstance(line, Verdict)] == [True] * 3


def priorities_of(pid: int | None) -> list[int]:
    """Of each thread, the highest first; one that ends meanwhile is left out."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.append(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return sorted(found)


def test_all_threads_of_the_verifier_but_those_that_listen_and_start_others_have_the_lowest_priority(
    made: Made,
) -> None:
    """The two could not have it back."""
    one = Verifier(made.root.path, scrub_every_s=1e6)
    one.start()
    try:
        wait_until(lambda: one.read_reports() or one.status()["watching"] == "events")
        # Each lowers itself when it begins.
        wait_until(lambda: len(seen := priorities_of(one.pid)) > 3 and seen[2:] == [LOWEST] * len(seen[2:]))
        assert priorities_of(one.pid)[:2] == [OURS] * 2
    finally:
        one.stop()


# --- the session --------------------------------------------------------------------------------------


class Session:
    """Where sessions share CPUs first, the nice of a process alone in its own is nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[bool] = []
        self.refusals = 0
        monkeypatch.setattr(pace, "step_back_session", self._asked)

    def _asked(self, back: bool) -> bool:
        self.told.append(back)
        self.refusals -= 1
        return self.refusals < 0


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    return Session(monkeypatch)


def test_the_session_steps_back_from_the_first_read_on_that_nobody_waits_for(session: Session) -> None:
    paced = Pace()
    paced.hurry(True)
    paced.background(iter(()))  # type: ignore[arg-type]
    assert session.told == []
    paced.hurry(False)
    assert session.told == [True]
    paced.background(iter(()))  # type: ignore[arg-type]
    assert session.told == [True, True]


def test_the_session_comes_back_in_the_middle_though_the_kernel_refuses_at_first(session: Session) -> None:
    paced = Pace()
    paced.background(iter(()))  # type: ignore[arg-type]
    session.refusals = 2
    paced.hurry(True)
    assert session.told == [True, False, False, False]


# --- how it comes to know -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tell", "line"), [(Verifier.hurry, Hurry), (Verifier.writing, Writing)])
def test_the_verifier_is_told_when_that_changes_and_a_new_one_anew(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Any, line: Any
) -> None:
    heard = tmp_path / "heard"
    heard.touch()
    script = tmp_path / "child"
    script.write_text(f"#!/bin/sh\nexec cat >> {heard}\n")
    script.chmod(0o755)
    monkeypatch.setattr(verifier_process.sys, "executable", str(script))
    one = Verifier(made.root.path, backoff_first_s=0.01)

    def heard_is(*lines: Line) -> None:
        wait_until(lambda: [from_line(data) for data in heard.read_bytes().splitlines()] == list(lines))

    tell(one, True)  # there is nobody to tell it to
    one.start()
    try:
        for now in (False, True, True, False, True):
            tell(one, now)
        heard_is(line(True), line(False), line(True))
        first = one.pid
        assert first is not None
        os.kill(first, 9)
        wait_until(lambda: one.read_reports() or one.pid not in (None, first))
        tell(one, True)
        heard_is(line(True), line(False), line(True), line(True))
    finally:
        one.stop()


def test_a_client_says_once_that_it_waits_for_the_proof_of_one_that_is_committed_already(
    tmp_path: Path,
) -> None:
    root = Root.open(tmp_path / "root", create=True)
    with (
        FakeDaemon(root) as fake,
        ckptd.Client(root.path, daemon="attach", close_timeout_s=60.0) as client,
    ):
        ticket = client.snapshot(1, {"weights": torch.zeros(10)}).wait(timeout_s=60)

        def said_after_a_wait() -> list[int]:
            with contextlib.suppress(TimedOut):
                ticket.wait("verified", timeout_s=0.05)
            ticket.wait("committed", timeout_s=0.05)
            client.status()  # what was sent before it has arrived
            hurries = [one for one in fake.named(wire.Hurry) if isinstance(one, wire.Hurry)]
            return [one.snapshot for one in hurries if one.verified]

        wait_until(lambda: bool(said_after_a_wait()))  # on a busy machine one wait is over before it is long
        assert said_after_a_wait() == [1]
