"""How check_resume ends: a job that never would, one that leaves something behind, a check that is ended itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptd
import jobs_ending
from ckptd.errors import InvalidArgument
from ckptd.proof.ending import ending_in_order
from ckptd.proof.own_process import keep_sockets_in
from ckptd_daemon.cli import check_resume as command
from fake_daemon import wait_until
from test_check_resume import CLI, TESTS, example, gone, pids_in, ran_out_of_time


@pytest.fixture
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


UNGUARDED = (
    "import ckptd, torch\nfrom torch.utils.data import DataLoader\n"
    "open('imported', 'a').write('x')\n"
    "data = torch.linspace(-1, 1, 40).reshape(10, 4)\n\n"
)


@pytest.mark.slow
def test_a_script_without_the_guard_is_refused_in_its_first_run_and_starts_no_checks_without_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(
        f"{UNGUARDED}{example()}\nprint(ckptd.check_resume(make_job, steps=4))\n"
    )
    for line in ([sys.executable, "train.py"], [*CLI, "train.py:make_job", "--steps", "4"]):
        (tmp_path / "imported").write_text("")
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode in (1, 2) and done.stdout == ""
        assert "put the call below `if __name__ == '__main__':`" in done.stderr
        assert len((tmp_path / "imported").read_text()) <= 2


def test_a_check_within_a_check_is_a_wrong_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_CHECK_RESUME", "a plan")
    with pytest.raises(InvalidArgument, match="called by the job that it checks"):
        ckptd.check_resume(jobs_ending.whole, steps=4)


@pytest.mark.slow
def test_a_job_whose_fork_leaves_by_itself_is_exact() -> None:
    assert ckptd.check_resume(jobs_ending.forks, steps=4, timeout_s=100).exact


@pytest.mark.slow
def test_a_thread_that_keeps_the_process_from_ending_is_said_with_its_stack() -> None:
    error, _ = ran_out_of_time(jobs_ending.leaves_a_thread, "did its steps", "in _shutdown")
    assert "did its steps, and then its process did not end in time" in str(error)
    assert "a thread that isn't a daemon" in error.todo
    (note,) = error.__notes__
    assert 'threading.py", line' in note and "in _shutdown" in note


@pytest.mark.slow
def test_what_the_job_starts_in_a_session_of_its_own_ends_with_the_run(tmp_path: Path) -> None:
    assert ckptd.check_resume(jobs_ending.leaves_a_session, steps=4, keep=tmp_path / "kept").exact
    pids = [pid for log in (tmp_path / "kept").glob("*.log") for pid in pids_in(log.read_text())]
    assert len(pids) == 3
    wait_until(lambda: all(map(gone, pids)))


@pytest.mark.slow
def test_the_workers_of_a_run_that_is_killed_leave_no_folders() -> None:
    # multiprocessing makes one for its sockets, and a SIGKILL lets nobody remove it.
    with tempfile.TemporaryDirectory(prefix="c") as temp:
        kept = Path(temp) / "kept"
        done = subprocess.run(
            [*CLI, f"{TESTS / 'jobs_exact.py'}:with_workers", "--steps", "3", "--keep", str(kept)],
            env=os.environ | {"TMPDIR": temp}, capture_output=True, text=True, timeout=250,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [path.name for path in Path(temp).iterdir() if path.name.startswith(("pymp", "ckptd"))] == []
        assert not (kept / "sockets").exists() and (kept / "killed.log").exists()


def test_sockets_lie_where_their_names_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    monkeypatch.setattr(multiprocessing.current_process(), "_config", config)
    keep_sockets_in(tmp_path / ("long" * 20))
    assert config == {} and list(tmp_path.iterdir()) == []
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as short:
        keep_sockets_in(Path(short) / "s")
        assert config == {"tempdir": f"{short}/s"}
        assert (Path(short) / "s").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_script_that_is_ended_while_it_checks_leaves_nothing_and_dies_of_the_signal(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "import ckptd, jobs_faulty\nckptd.check_resume(jobs_faulty.hangs, steps=5)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as checks:
        logs = lambda: list(tmp_path.glob("ckptd-check-*/uninterrupted.log"))  # noqa: E731
        wait_until(lambda: any("going to sleep" in log.read_text() for log in logs()))
        pids = pids_in(logs()[0].read_text())
        checks.send_signal(signal.SIGTERM)
        assert checks.wait(100) == -signal.SIGTERM
    wait_until(lambda: all(map(gone, pids)))
    assert list(tmp_path.glob("ckptd-*")) == []


def test_a_handler_of_the_users_stays_while_it_checks(as_before: None) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    with ending_in_order():
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_no_handler_stays_after_the_check_and_none_is_set_in_another_thread(as_before: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    seen: list[Any] = []

    def look() -> None:
        with ending_in_order():
            seen.append(signal.getsignal(signal.SIGTERM))

    other = threading.Thread(target=look)
    other.start()
    other.join()
    assert seen == [signal.SIG_DFL]
    look()
    assert seen[1] is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_does_not_cut_the_cleaning_short(as_before: None) -> None:
    # `timeout` sends it to the command and then to its group.
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        command._leave(signal.SIGTERM, None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what is ignored stays so in a new process
    program = (
        "import os, signal\nfrom ckptd.proof.ending import ending_in_order\n"
        "with ending_in_order():\n"
        "    try:\n        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n        signal.raise_signal(signal.SIGTERM)\n        print('cleaned', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.returncode) == ("cleaned\n", -signal.SIGTERM), done.stderr
