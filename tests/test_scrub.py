"""What seems unchanged is read again: rot is found, one thing at a time, beside everything else the verifier does."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import verification
from ckptd.disk.run_index import read_run_index
from ckptd_daemon.verify import verifier
from ckptd_daemon.verify.backlog import Job
from ckptd_daemon.verify.turn import Turn
from ckptd_daemon.verify.verifier import VerifierLoop
from ckptd_daemon.verify.verifier_lines import (
    Line,
    LogLine,
    Request,
    ScrubState,
    Verdict,
    Writing,
    from_line,
    to_line,
)
from ckptd_daemon.verify.verifier_process import Verifier
from fake_daemon import wait_until
from made_series import Made, flip_byte
from real_disks import disk
from rotten import read_long_ago, rot

WEEK = 7 * 86_400.0
FAST = {"rescan_s": 0.3, "poll_s": 0.2, "settle_s": 0.1}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "root")


class Scrubbing:
    """A verifier of this process, as one that has just started, and what it tells."""

    def __init__(self, made: Made, every_s: float = WEEK) -> None:
        self.sent: list[Line] = []
        self.loop = VerifierLoop(
            made.root.path, self.sent.append, rescan_s=600, poll_s=600, settle_s=0, scrub_every_s=every_s,  # type: ignore[arg-type]
        )  # fmt: skip
        self.scrub = self.loop.scrub
        self.look()

    def look(self) -> None:
        for _ in self.loop._list_everything():
            pass

    def due(self) -> str:
        """The name of the one that is read next, "" for none."""
        key = self.scrub._rota.next(time.monotonic())
        return "" if key is None else key[1]

    def read(self, name: str) -> None:
        self.scrub.read("r", name)

    def check(self) -> list[str]:
        """Have the main thread do all it has to; what it took."""
        taken = []
        while (job := self.loop._backlog.take(time.monotonic())) is not None:
            taken.append(job.name)
            self.loop._check(job)
        return taken

    def told(self) -> list[tuple[str, bool]]:
        return [(line.report.name, line.report.ok) for line in self.sent if isinstance(line, Verdict)]

    def logged(self) -> list[str]:
        return [line.text for line in self.sent if isinstance(line, LogLine) and "scrub." in line.text]

    def state(self) -> ScrubState:
        return [line for line in self.sent if isinstance(line, ScrubState)][-1]


def committed(made: Made, *steps: int, shards: int | None = None) -> list[str]:
    names = [made.commit(step, shards=shards, verify=True).name for step in steps]
    made.catalogue.write_index()
    return names


# --- what it finds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "file"),
    [
        (2, "index.json"), (2, "tensors.json"), (2, "meta.pt"), (2, "model.shard-000.pt"), (None, "ckpt.pt"),
        (None, "tensors.json"),
    ],
)  # fmt: skip
def test_a_bit_that_changed_beneath_the_file_system_is_found_and_acted_upon(
    made: Made, shards: int | None, file: str
) -> None:
    before, name, _ = committed(made, 1, 2, 3, shards=shards)
    read_long_ago(made.dir, name)
    running = Scrubbing(made) if file == "index.json" else None  # a start reads each index
    rot(made.dir / name / file)
    one = running or Scrubbing(made)
    assert one.check() == []  # nothing shows
    assert one.due() == name
    one.read(name)
    assert one.told() == []  # a second look decides
    assert one.check() == [name] and one.told() == [(name, False)]
    (verdict,) = [line for line in one.sent if isinstance(line, Verdict)]
    assert file in verdict.report.faults[0]
    if file != "index.json":
        assert verdict.report.faults[0].count("sha256") and made.catalogue.find("c" * 32, 2)
    assert made.catalogue.apply_report(verdict.report) == "corrupt"
    quarantined = [path.name for path in (made.dir / "quarantine").glob("*")]
    assert len(quarantined) == (file != "index.json")  # whose it is can't be told without
    assert all(path.startswith(f"{name}-2-") for path in quarantined)
    assert made.names == sorted({before, "step-000000003", *([name] if not quarantined else [])})
    one.look()
    one.scrub._tell()
    assert (one.state().found, one.state().unread) == (1, 0)
    assert one.state().last_found.startswith(f"r/{name}: {file}")
    assert one.logged()[0].startswith(f"scrub.failed run=r name={name} {file}")


def test_what_is_whole_is_marked_anew_and_due_again_only_in_days(made: Made) -> None:
    name, fresh = committed(made, 1, 2)
    read_long_ago(made.dir, name)
    one = Scrubbing(made)
    assert one.due() == name
    one.read(name)
    assert one.told() == [(name, True)] and one.due() == "" and one.check() == []
    verdict = next(line for line in one.sent if isinstance(line, Verdict))
    made.reopen()
    assert made.catalogue.apply_report(verdict.report) == "verified"
    made.catalogue.write_index()
    assert Scrubbing(made).due() == ""  # after a restart too
    index = read_run_index(made.dir)
    assert index is not None
    assert {mark.name for mark in index.marks} == {name, fresh}
    assert all(time.time() - mark.verified_at < 3600 for mark in index.marks)


@pytest.mark.parametrize("years", [-10, 10])
def test_a_mark_of_another_time_is_read_again_at_once_and_the_clock_puts_none_off(
    made: Made, years: int
) -> None:
    (name,) = committed(made, 1)
    read_long_ago(made.dir, name, at=time.time() + years * 366 * 86_400)
    assert Scrubbing(made).due() == name


def test_abandoned_and_foreign_ones_and_those_of_every_run_are_read_again_too(
    made: Made, tmp_path: Path
) -> None:
    first, abandoned = committed(made, 1, 2)
    fork = made.commit(3, base=1, verify=True).name
    other = Made(made.root.path, "other")
    elsewhere = committed(other, 7)[0]
    foreign = Made(tmp_path / "foreign")
    shutil.copytree(foreign.commit(9).path, made.dir / "step-000000009")
    made.catalogue.rescan()
    made.verify("step-000000009")
    made.catalogue.write_index()
    names = [first, abandoned, fork, "step-000000009"]
    read_long_ago(made.dir, *names)
    read_long_ago(other.dir, elsewhere)
    one = Scrubbing(made)
    assert {key for key in iter(lambda: one.scrub._rota.next(time.monotonic()), None) if _forget(one, key)} == {
        *(("r", name) for name in names), ("other", elsewhere),
    }  # fmt: skip


def _forget(one: Scrubbing, key: tuple[str, str]) -> bool:
    one.scrub._rota.forget(key)
    return True


# --- what it doesn't act upon -------------------------------------------------------------------------


def test_one_that_cannot_be_read_is_said_once_tried_again_later_and_never_called_corrupt(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = committed(made, 1)
    read_long_ago(made.dir, name)
    one = Scrubbing(made)

    def broken(fd: int, **_more: Any) -> Iterator[None]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    with monkeypatch.context() as patch:
        patch.setattr(verification, "hashing", broken)
        for _ in range(2):
            one.read(name)
    assert one.told() == [] and one.check() == [] and one.due() == ""
    (said,) = one.logged()
    assert f"run=r name={name}" in said and os.strerror(errno.EIO) in said
    assert one.state().unread == 1 and os.strerror(errno.EIO) in one.state().last_unread
    assert 3000 < (one.state().next_s or 0.0) <= 3600
    one.read(name)
    assert one.told() == [(name, True)] and one.state().unread == 0


def test_a_failure_that_the_second_look_does_not_find_is_none(made: Made) -> None:
    name, _ = committed(made, 1, 2)
    read_long_ago(made.dir, name)
    one = Scrubbing(made)
    good = (made.dir / name / "ckpt.pt").read_bytes()
    flip_byte(made.dir / name / "ckpt.pt")  # the bus, or memory, once
    one.read(name)
    (made.dir / name / "ckpt.pt").write_bytes(good)
    one.look()
    assert one.check() == [name]
    assert one.told() == [(name, True)]
    one.scrub._tell()
    assert one.state().found == 0


class Paused(Turn):
    """One that waits for a long time after the first piece, and says so."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        super().__init__(wait=self._wait_and_say)

    def _wait_and_say(self, changed: threading.Condition, _s: float) -> None:
        self.waits.set()
        changed.wait(0.01)


@contextlib.contextmanager
def in_mid_read(one: Scrubbing, name: str) -> Iterator[Callable[[], None]]:
    """The scrub's thread is reading this one and waits, since checkpoints are written; the call ends that."""
    turn = one.scrub.turn = Paused()
    one.loop.heed(Writing(True))

    def end() -> None:
        one.loop.heed(Writing(False))
        thread.join(60)
        assert not thread.is_alive()

    thread = threading.Thread(target=one.read, args=(name,), daemon=True)
    thread.start()
    assert turn.waits.wait(60)
    yield end
    end()


def test_it_waits_in_mid_read_while_checkpoints_are_written_and_what_is_asked_for_is_checked_meanwhile(
    made: Made,
) -> None:
    old, new = committed(made, 1, 2)
    read_long_ago(made.dir, old)
    one = Scrubbing(made)
    with in_mid_read(one, old) as end:
        one.loop.heed(Request("r", new))
        assert one.check() == [new] and one.told() == [(new, True)]
        assert one.state().reading == f"r/{old}"
        end()
        assert one.told() == [(new, True), (old, True)]
        assert one.state().reading == "" and one.state().passed == 1


def test_it_waits_while_anything_else_is_checked(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = committed(made, 1)
    one, seen = Scrubbing(made), []
    check = verification.check

    def seeing(*args: Any, **more: Any) -> Any:
        seen.append(repr(one.scrub.turn))
        return check(*args, **more)

    monkeypatch.setattr(verifier, "check", seeing)
    one.loop._check(Job("r", name, asked=True))
    assert seen == ["<Turn of checks>"] and repr(one.scrub.turn) == "<Turn free>"
    monkeypatch.setattr(verifier, "check", lambda *_args, **_more: (_ for _ in ()).throw(OSError("broken")))
    one.loop._check(Job("r", name, asked=True))
    assert repr(one.scrub.turn) == "<Turn free>"


def test_one_that_retention_removes_in_mid_read_is_gone_not_corrupt_and_its_files_are_closed(
    made: Made,
) -> None:
    old, _ = committed(made, 1, 2)
    read_long_ago(made.dir, old)
    one = Scrubbing(made)
    with in_mid_read(one, old):
        held = [fd for fd in _open_files() if old in fd]
        assert held
        (made.dir / old).rename(made.dir / ".trash-1-x")
        wait_until(lambda: not [fd for fd in _open_files() if ".trash-1-x" in fd])  # though writes go on
    assert one.told() == [] and one.check() == [] and one.logged() == []
    assert one.due() == "" and one.state().reading == ""


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


# --- the process --------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(made: Made, every_s: float) -> Iterator[Verifier]:
    one = Verifier(made.root.path, scrub_every_s=every_s, **FAST)
    one.start()
    try:
        yield one
    finally:
        one.stop()


def test_a_verifier_reads_what_is_due_by_itself_and_its_next_life_does_not_again(made: Made) -> None:
    old, fresh = committed(made, 1, 2)
    read_long_ago(made.dir, old)
    with running(made, WEEK) as one:
        ((run, report),) = _first_reports(one)
        scrub = _after(one, lambda scrub: scrub["passed"] == 1)
    assert (run, report.name, report.ok) == ("r", old, True)
    assert (scrub["checkpoints"], scrub["due"], scrub["late"]) == (2, 0, 0)
    made.reopen()
    made.catalogue.apply_report(report)
    made.catalogue.write_index()
    with running(made, WEEK) as one:
        scrub = _after(one, lambda scrub: scrub["checkpoints"] == 2)
        assert (scrub["due"], scrub["passed"]) == (0, 0)
        assert scrub["next_s"] > 3 * 86_400 > 3600 > scrub["oldest_s"]
        assert fresh and not one.read_reports()


def _first_reports(one: Verifier) -> list[tuple[str, verification.Report]]:
    reports: list[tuple[str, verification.Report]] = []

    def came() -> bool:
        reports.extend(one.read_reports())
        return reports != []

    wait_until(came)
    return reports


def _after(one: Verifier, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What its scrub says once that is so."""

    def so() -> bool:
        one.read_reports()
        scrub = one.status()["scrub"]
        return "checkpoints" in scrub and true(scrub)

    wait_until(so)
    scrub: dict[str, Any] = one.status()["scrub"]
    return scrub


def test_one_that_is_turned_off_reads_nothing_again(made: Made) -> None:
    old, fresh = committed(made, 1, 2)
    read_long_ago(made.dir, old)
    with running(made, 0) as one:
        one.verify("r", fresh)  # takes longer than a look at what is due
        assert [report.name for _, report in _first_reports(one)] == [fresh]
        assert one.status()["scrub"] == {"every_s": 0, "gives_way": False}


def test_a_verifier_whose_scrub_has_died_is_replaced_and_not_believed(made: Made) -> None:
    """No such fault is known, so one is made."""
    script = (
        "import os, sys, threading; from ckptd_daemon.verify import scrub, verifier\n"
        "scrub.lower_this_thread = lambda: 1 / 0\n"
        f"verifier.main(['--root', {str(made.root.path)!r}, '--parent', str(os.getppid()), '--rescan-s', '9',"
        " '--poll-s', '9', '--settle-s', '9', '--scrub-every-s', '9999'])"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        assert child.stderr is not None and child.wait(60) == 1
        assert b"ZeroDivisionError" in child.stderr.read()


def test_its_lines_survive_the_pipe_and_nonsense_is_refused() -> None:
    state = ScrubState(
        checkpoints=3, due=2, late=1, oldest_s=None, next_s=4.5, reading="r/x", last_found="\u2028\n"
    )
    for line in (state, Writing(True), Writing(False)):
        assert from_line(to_line(line)) == line
    for bad in (b'{"ScrubState": {"checkpoints": 1}}', b'{"ScrubState": [1]}', b'{"Writing": {}}',
                to_line(state).replace(b"4.5", b'"soon"')):  # fmt: skip
        with pytest.raises(ValueError, match="not a line"):
            from_line(bad)


# --- the medium itself --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.privileged
def test_a_bit_that_rots_on_a_real_disk_is_found_though_the_file_system_and_its_cache_know_nothing(
    tmp_path: Path,
) -> None:
    with disk(tmp_path / "disk", "ext4") as small:
        made = Made(small.path / "root")
        names = committed(made, 1, 2, 3, shards=2)
        os.sync()
        one = Scrubbing(made)
        hurt = {names[0]: "index.json", names[1]: "model.shard-000.pt", names[2]: "meta.pt"}
        before = {name: verification.stat_signature(made.dir / name) for name in hurt}
        for name, file in hurt.items():
            content = (made.dir / name / file).read_bytes()  # and it is in memory
            _rot_in(small._image, content)
        for name in hurt:
            one.read(name)
        assert sorted(one.check()) == sorted(hurt)
        assert sorted(one.told()) == [(name, False) for name in sorted(hurt)]
        assert {name: verification.stat_signature(made.dir / name) for name in hurt} == before


def _rot_in(image: Path, content: bytes) -> None:
    """Change a bit of this file where it lies."""
    at = image.read_bytes().find(content)
    if at < 0:
        pytest.skip("the file lies in pieces")
    with image.open("r+b") as file:
        file.seek(at + len(content) // 2)
        byte = file.read(1)[0]
        file.seek(at + len(content) // 2)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
