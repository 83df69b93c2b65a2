from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.disk.lock import RootLock
from ckptd.disk.verification import Report, check
from ckptd.names import work_folder
from ckptd_daemon.verify.verifier_lines import Line, Request, Verdict, WatchState, from_line, to_line
from ckptd_daemon.verify.verifier_process import Verifier
from made_series import Made, flip_byte
from open_files import open_files
from told_signals import stop

FAST = {"rescan_s": 0.3, "poll_s": 0.2, "settle_s": 0.1, "backoff_first_s": 0.05}
BY_EVENTS_ALONE = {"rescan_s": 600.0, "poll_s": 600.0, "settle_s": 0.05, "backoff_first_s": 0.05}


class Running:
    """A verifier on a made series, and all it has reported."""

    def __init__(self, made: Made, timing: dict[str, float]) -> None:
        self.made = made
        self.reports: list[Report] = []
        self.verifier = Verifier(made.root.path, **timing)
        self.verifier.start()

    def until(self, enough: Callable[[], object], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not enough():
            assert time.monotonic() < end, f"{self.verifier!r} {self.verifier.status()} {self.reports}"
            select.select([self.verifier.fileno()], [], [], 0.05)
            self.reports += [report for _, report in self.verifier.read_reports()]

    def of(self, name: str, *, ok: bool = True) -> list[Report]:
        return [r for r in self.reports if r.name == name and r.ok is ok]

    def watching(self, mode: str) -> None:
        self.until(lambda: self.verifier.status()["watching"] == mode)

    @property
    def child(self) -> int:
        pid = self.verifier.pid
        assert pid is not None
        return pid


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "root")


@pytest.fixture
def running(made: Made, request: pytest.FixtureRequest) -> Iterator[Running]:
    started = Running(made, getattr(request, "param", FAST))
    yield started
    started.verifier.stop()


def copied_from_elsewhere(made: Made, tmp_path: Path, step: int) -> Path:
    """A whole checkpoint folder outside the root, on the same file system."""
    other = Made(tmp_path / f"elsewhere-{step}")
    return other.commit(step).path


def test_a_checkpoint_asked_for_is_read_from_the_medium_and_reported(made: Made, running: Running) -> None:
    name = made.commit(1).name
    running.verifier.verify("r", name)
    running.until(lambda: running.of(name))
    report = running.of(name)[0]
    assert (report.path, report.sequence, report.faults) == (made.dir / name, 1, ())
    assert report.how == check(made.dir / name, uncached=True).how
    assert running.verifier.pending == 0


def test_a_damaged_one_is_reported_with_file_and_both_hashes(made: Made, running: Running) -> None:
    committed = made.commit(1)
    flip_byte(committed.path / "ckpt.pt")
    running.verifier.verify("r", committed.name)
    running.until(lambda: running.of(committed.name, ok=False))
    (fault,) = running.reports[-1].faults
    assert "ckpt.pt" in fault
    assert committed.index.shards[0].sha256 in fault


def test_one_that_is_gone_is_answered_as_gone_not_corrupt(made: Made, running: Running) -> None:
    running.verifier.verify("r", "step-000000077")
    running.until(lambda: running.reports)
    assert running.reports[0].gone
    assert not running.reports[0].faults


@pytest.mark.parametrize("running", [BY_EVENTS_ALONE], indirect=True)
def test_events_alone_find_a_move_in_a_rename_and_a_burst_of_writes(
    made: Made, running: Running, tmp_path: Path
) -> None:
    first = made.commit(1).name  # makes the run: an event in the root
    running.watching("events")
    running.until(lambda: running.of(first))
    moved = copied_from_elsewhere(made, tmp_path, 2)
    moved.rename(made.dir / moved.name)
    running.until(lambda: running.of("step-000000002"))
    under_temp = copied_from_elsewhere(made, tmp_path, 3)
    temp = made.dir / work_folder("tmp", 9)
    shutil.copytree(under_temp, temp)
    temp.rename(made.dir / "step-000000003")
    running.until(lambda: running.of("step-000000003"))
    (made.dir / "step-000000003").rename(made.dir / "step-000000003.2")
    running.until(lambda: running.of("step-000000003.2"))
    assert {r.name for r in running.reports} == {
        first,
        "step-000000002",
        "step-000000003",
        "step-000000003.2",
    }
    assert all(r.ok for r in running.reports)


def test_a_folder_that_fills_slowly_is_reported_once_and_whole(
    made: Made, running: Running, tmp_path: Path
) -> None:
    made.commit(1)
    for step in range(5, 1000):
        source = copied_from_elsewhere(made, tmp_path, step)
        target, began = made.dir / source.name, time.monotonic()
        target.mkdir()
        for file in sorted(source.iterdir()):  # the index comes before the last files, as in any copy
            shutil.copy(file, target)
            running.reports += [r for _, r in running.verifier.read_reports()]
        if time.monotonic() - began < FAST["settle_s"]:
            break  # on a busy machine it may have lain still in the middle for so long: then another one
    running.until(lambda: running.of(source.name))
    assert len([r for r in running.reports if r.name == source.name]) == 1


def test_a_changed_file_of_a_reported_checkpoint_is_found_though_size_and_mtime_are_the_same(
    made: Made, running: Running
) -> None:
    committed = made.commit(1)
    running.until(lambda: running.of(committed.name))
    flip_byte(committed.path / "ckpt.pt", keep_times=True)
    running.until(lambda: running.of(committed.name, ok=False))


def test_a_file_replaced_in_place_by_the_same_bytes_is_verified_again(made: Made, running: Running) -> None:
    committed = made.commit(1)
    running.until(lambda: running.of(committed.name))
    replacement = committed.path / "new"
    shutil.copy(committed.path / "ckpt.pt", replacement)
    replacement.rename(committed.path / "ckpt.pt")
    running.until(lambda: len(running.of(committed.name)) >= 2)


def test_what_arrives_while_the_verifier_is_down_is_found_by_the_next_one(
    made: Made, running: Running
) -> None:
    first = made.commit(1).name
    running.until(lambda: running.of(first))
    os.kill(running.child, signal.SIGKILL)
    second = made.commit(2).name
    running.until(lambda: running.of(second))
    assert running.verifier.status()["restarts"] >= 1


def test_a_request_outlives_the_verifier_that_got_it(made: Made, running: Running) -> None:
    stop(running.child)
    name = made.commit(1, verify=True).name
    made.catalogue.write_index()  # verified already: nobody would read it again unasked
    running.verifier.verify("r", name)
    os.kill(running.child, signal.SIGKILL)
    running.until(lambda: running.of(name))
    assert running.verifier.pending == 0


def test_temporary_and_foreign_names_are_never_touched(made: Made, running: Running) -> None:
    name = made.commit(1).name
    for other in (
        work_folder("tmp", 3),
        work_folder("trash", 3),
        "step_10-hf",
        ".ipynb_checkpoints",
        "step_-1",
    ):
        shutil.copytree(made.dir / name, made.dir / other)
    (made.dir / ".nfs0001").touch()
    (made.dir / "step-000000002").symlink_to(made.dir / name)
    (made.dir / "step-000000003").symlink_to("nowhere")
    (made.dir / "step-000000004").touch()
    last = made.commit(9).name
    running.until(lambda: running.of(last) and running.of(name))
    running.watching("events")
    assert {r.name for r in running.reports} == {name, last}


def test_what_an_earlier_verifier_verified_is_not_read_again_after_a_restart(made: Made) -> None:
    high = [made.commit(step, verify=True).name for step in (100, 200)]
    made.catalogue.write_index()
    low = made.commit(5).name
    started = Running(made, FAST)
    try:
        started.until(lambda: started.of(low))  # the higher steps would have come first
        assert not [r for r in started.reports if r.name in high]
    finally:
        started.verifier.stop()


def test_it_has_no_lock_no_torch_and_no_descriptor_of_its_parents(made: Made) -> None:
    with RootLock(made.root), open(os.devnull, "rb") as inheritable:
        os.set_inheritable(inheritable.fileno(), True)
        started = Running(made, FAST)
        try:
            started.watching("events")
            assert not [f for f in open_files(started.child) if f.endswith("/lock") or f == os.devnull]
            maps = Path(f"/proc/{started.child}/maps").read_text()
            assert "torch" not in maps
            assert "numpy" not in maps
            assert os.getsid(started.child) != os.getsid(0)
        finally:
            started.verifier.stop()


@pytest.mark.parametrize(
    "heir", ["", "os.fork() or time.sleep(60)"], ids=["alone", "with an heir to its pipes"]
)
def test_it_dies_with_its_parent(made: Made, heir: str) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from ckptd_daemon.verify.verifier_process import Verifier\n"
        "v = Verifier(Path(sys.argv[1])); v.start()\n"
        "while v.status()['watching'] != 'events': v.read_reports(); time.sleep(0.01)\n"
        f"heir = {heir or 0}\n"
        "print(v.pid, heir, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(made.root.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, forked = map(int, parent.stdout.readline().split())
        child = os.pidfd_open(pid)
        try:
            parent.kill()
            assert select.select([child], [], [], 60)[0]
        finally:
            os.close(child)
            if forked:
                os.kill(forked, signal.SIGKILL)


def test_a_stopped_verifier_neither_blocks_the_daemon_nor_its_end(made: Made) -> None:
    started = Running(made, FAST)
    started.watching("events")
    stop(started.child)
    for step in range(5_000):  # far more than a pipe holds
        started.verifier.verify("r", f"step-{step:09d}")
    assert started.verifier.pending == 5_000
    before = time.monotonic()
    started.verifier.stop(timeout_s=0.2)
    assert time.monotonic() - before < 30
    assert started.verifier.pid is None


def test_one_that_dies_again_and_again_is_started_less_and_less_often(made: Made, running: Running) -> None:
    for _ in range(3):
        running.until(lambda: running.verifier.pid is not None)
        killed = running.child
        os.kill(killed, signal.SIGKILL)
        # None, or the next one's: what it waits for may be over in the same look.
        running.until(lambda killed=killed: running.verifier.pid != killed)
    assert running.verifier._backoff_s >= 0.4
    name = made.commit(1).name
    running.until(lambda: running.of(name))
    assert running.verifier._backoff_s == 0.05


# --- where events fail ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("running", [{**BY_EVENTS_ALONE, "poll_s": 0.1}], indirect=True)
def test_a_queue_overflow_is_named_and_the_checkpoint_it_hid_is_found(made: Made, running: Running) -> None:
    first = made.commit(1).name
    running.until(lambda: running.of(first))
    running.watching("events")
    stop(running.child)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 50_000:
        pytest.skip(f"the queue holds {limit} events here")
    spam = made.dir / "spam"
    for _ in range(limit // 3):  # create, open, close, delete: four events each
        spam.touch()
        spam.unlink()
    hidden = made.commit(2).name
    os.kill(running.child, signal.SIGCONT)
    running.until(lambda: running.of(hidden))
    running.watching("polling")
    assert "fs.inotify.max_queued_events" in running.verifier.status()["reason"]


@pytest.mark.privileged
@pytest.mark.parametrize(
    ("limit", "value", "named"),
    [
        ("max_inotify_instances", 0, "fs.inotify.max_user_instances"),
        ("max_inotify_watches", 0, "fs.inotify.max_user_watches"),
        ("max_inotify_watches", 1, "fs.inotify.max_user_watches"),  # enough for the root, not for the run
    ],
)
def test_without_watches_or_instances_it_polls_and_names_the_limit(
    made: Made, limit: str, value: int, named: str
) -> None:
    first = made.commit(1).name
    command = [
        sys.executable, "-m", "ckptd_daemon.verify", "--root", str(made.root.path),
        "--parent", str(os.getpid()), "--rescan-s", "600", "--poll-s", "0.1", "--settle-s", "0.05",
    ]  # fmt: skip
    shell = f'echo {value} > /proc/sys/user/{limit} || exit 77; exec "$@"'
    with subprocess.Popen(
        ["unshare", "-Ur", "sh", "-c", shell, "sh", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        lines = iter(lambda: _next_line(child), None)
        reasons, second = [], ""
        for line in lines:
            if isinstance(line, WatchState):
                reasons.append(line.reason)
            if isinstance(line, Verdict) and line.report.name == first:
                second = made.commit(2).name
            if isinstance(line, Verdict) and line.report.name == second:
                break
        else:
            pytest.skip("no user namespaces with limits here")
        assert any(named in reason for reason in reasons)
        child.kill()


def _next_line(child: subprocess.Popen[bytes]) -> Line | None:
    assert child.stdout is not None
    data = child.stdout.readline()
    return from_line(data) if data else None


NOT_LINES = (
    b"", b"{}", b"[]", b"\xff", b'{"Nope": {}}', b'{"Request": {"run": "../x", "name": "step-000000001"}}',
    b'{"Request": {"run": "r", "name": "../../etc"}}', b'{"Verdict": {"run": "r", "report": {}}}',
)  # fmt: skip


def test_lines_survive_the_pipe_and_nonsense_is_refused() -> None:
    report = Report(
        path=Path("/r/step-000000001"), name="step-000000001", sequence=None, index_sha256="", ok=False,
        gone=False, faults=("x\ny\u2028" * 5000,) * 60, bytes=3, how="cached", stat_signature="s",
    )  # fmt: skip
    back = from_line(to_line(Verdict("r", report)))
    assert isinstance(back, Verdict)
    assert back.report.path == report.path
    assert len(back.report.faults) == 50
    assert to_line(Verdict("r", report)).count(b"\n") == 1
    assert from_line(to_line(Request("r", "step-000000001"))) == Request("r", "step-000000001")
    for bad in NOT_LINES:
        with pytest.raises(ValueError, match="not a line"):
            from_line(bad)
