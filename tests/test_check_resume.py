"""check_resume with real processes: fresh interpreters, a real SIGKILL, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptd
import jobs_exact
import jobs_faulty
from ckptd.errors import InvalidArgument, JobFailed, TimedOut
from ckptd.proof.trace import read_trace
from fake_daemon import wait_until

TESTS = Path(__file__).parent
CLI = [sys.executable, "-m", "ckptd_daemon.cli.main", "check-resume"]


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary folders are made in: empty again afterwards."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def gone(pid: int) -> bool:
    """Whether the process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def pids_in(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"^pid (\d+)$", text, flags=re.M)]


@pytest.mark.slow
def test_an_exact_job_with_workers_is_exact_and_leaves_only_what_keep_asks_for(
    tmp_path: Path, temp: Path
) -> None:
    said: list[str] = []
    kept = tmp_path / "kept"
    report = ckptd.check_resume(jobs_exact.with_workers, steps=7, cuts=[3], keep=kept, progress=said.append)
    assert report.exact, str(report)
    assert str(report).startswith("EXACT  jobs_exact:with_workers: killed after step 3 of 7 and resumed")
    assert "7 steps without a break" in said[0] and "resumed from step 3 in a new process" in said[2]
    assert len(said) == 3
    assert list(temp.iterdir()) == []
    logs = [kept / f"{name}.log" for name in ("uninterrupted", "killed", "resumed-from-3")]
    pids = [pid for log in logs for pid in pids_in(log.read_text())]
    assert len(set(pids)) >= 3 * 2  # the process and its workers, each time
    wait_until(lambda: all(map(gone, pids)))
    killed = read_trace(kept / "killed.jsonl")
    assert (killed.saved, killed.done, killed.last_step) == ([3], False, 3)
    assert (kept / "checkpoints" / "check" / "step-000000003").is_dir()


@pytest.mark.slow
def test_a_job_that_raises_is_an_error_that_shows_its_traceback(temp: Path) -> None:
    with pytest.raises(JobFailed) as caught:
        ckptd.check_resume(jobs_faulty.raises_at_step_3, steps=5)
    assert str(caught.value) == (
        "the job failed at step 3 in the uninterrupted run: ArithmeticError: the third step is one too many"
    )
    assert 'raise ArithmeticError("the third step is one too many")' in caught.value.log
    assert caught.value.log in caught.value.__notes__[0]
    assert list(temp.iterdir()) == []


def ran_out_of_time(job: Callable[[], Any], come_to: str, shown: str) -> tuple[TimedOut, int]:
    """What a check says in the end, and the bound in which its run came so far and showed its stack: a busy machine
    needs a longer one."""
    for timeout_s in (5, 10, 20, 40):
        with pytest.raises(TimedOut) as caught:
            ckptd.check_resume(job, steps=5, timeout_s=timeout_s)
        if come_to in str(caught.value) and shown in caught.value.__notes__[0]:
            break
    return caught.value, timeout_s


@pytest.mark.slow
def test_a_job_that_hangs_is_killed_at_the_bound_and_its_stack_is_shown(temp: Path) -> None:
    error, bound_s = ran_out_of_time(jobs_faulty.hangs, "step 1 of 5", "in losses")
    assert f"the uninterrupted run did not end in time: step 1 of 5 after {bound_s} s" in str(error)
    (note,) = error.__notes__
    assert "going to sleep" in note and "jobs_faulty.py" in note and "in losses" in note
    pids = pids_in(note)
    assert len(pids) == 2
    wait_until(lambda: all(map(gone, pids)))  # what the job had started, too
    assert list(temp.iterdir()) == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What runs in the background of a shell starts with SIGINT ignored, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_ends_its_children_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [*CLI, f"{TESTS / 'jobs_faulty.py'}:hangs", "--steps", "5"],
        cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        logs = lambda: list(tmp_path.glob("ckptd-check-*/uninterrupted.log"))  # noqa: E731
        wait_until(lambda: any("going to sleep" in log.read_text() for log in logs()), timeout_s=60)
        pids = pids_in(logs()[0].read_text())
        assert len(pids) == 2 and not any(map(gone, pids))
        command.send_signal(number)
        assert command.wait(100) == 128 + number
    wait_until(lambda: all(map(gone, pids)))
    assert list(tmp_path.glob("ckptd-*")) == []  # torch makes folders of its own there


@pytest.mark.slow
def test_the_command_names_what_differs_as_json_and_exits_with_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLI, f"{TESTS / 'jobs_faulty.py'}:own_generator", "--steps", "4", "--cut", "2", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["exact"], report["cuts"]) == ("ckpt.v2-check-resume", False, [2])
    first: dict[str, Any] = report["first"]
    assert (first["phase"], first["cut"], first["step"], first["where"]) == ("resumed", 2, 3, "loss")
    assert first["suspects"][0]["name"] == "noise in losses()"
    assert done.stderr.count("\n") == 4 and "without a break again" in done.stderr


def example() -> str:
    """The job of the docstring."""
    lines = (ckptd.check_resume.__doc__ or "").splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip() == "def make_job():")
    end = next(i for i, line in enumerate(lines) if "if __name__ ==" in line)
    return textwrap.dedent("\n".join(lines[start:end]))


@pytest.mark.slow
def test_the_example_of_the_docstring_runs_as_a_script_and_is_exact(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import ckptd, torch\nfrom torch.utils.data import DataLoader\n\n"
        f"data = torch.linspace(-1, 1, 40).reshape(10, 4)\n\n{example()}\n"
        "if __name__ == '__main__':\n    print(ckptd.check_resume(make_job, steps=7))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("EXACT  script.py:make_job: killed after step 3 of 7 and resumed"), (
        done.stdout
    )
    assert "model, optimizer, loader, rng" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_command_that_readme_recipe_and_page_name_proves_the_example(tmp_path: Path) -> None:
    pages = ("README.md", "docs/resuming.md", "outputs/skill-checkpoint-save-resume.md")
    texts = [(TESTS.parent / page).read_text("utf-8") for page in pages]
    named = [re.findall(r"`ckptd check-resume ([^`]+)`", text) for text in texts]
    assert named == [[" ".join(["train.py:make_job", "--steps", "20"])]] * len(pages)
    (tmp_path / "train.py").write_text(
        "import ckptd, torch\nfrom torch.utils.data import DataLoader\n\n"
        f"data = torch.linspace(-1, 1, 40).reshape(10, 4)\n\n{example()}\n"
    )
    done = subprocess.run(
        [*CLI, *named[0][0].split()], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout[:5]) == (0, "EXACT"), done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_that_gives_no_pair_is_a_wrong_argument(temp: Path) -> None:
    with pytest.raises(InvalidArgument, match=re.escape("make_job() must return (state, losses): dict")):
        ckptd.check_resume(jobs_faulty.gives_no_pair, steps=5)
    assert list(temp.iterdir()) == []


@pytest.mark.slow
def test_a_job_that_dies_is_told_by_its_signal() -> None:
    with pytest.raises(JobFailed, match="ended in a way of its own: killed by SIGKILL"):
        ckptd.check_resume(jobs_faulty.is_killed_by_another, steps=5)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"steps": 1}, "steps"),
        ({"steps": "5"}, "step"),
        ({"steps": 5, "cuts": 5}, "cuts"),
        ({"steps": 5, "cuts": []}, "cuts"),
        ({"steps": 5, "cuts": [0]}, "cuts"),
        ({"steps": 5, "cuts": "every"}, "cuts"),
        ({"steps": 5, "timeout_s": 0}, "timeout_s"),
        ({"steps": 5, "timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_arguments_that_cant_be_right_are_refused_before_anything_runs(
    arguments: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ckptd.check_resume(jobs_exact.make_job, **arguments)
    assert caught.value.where == where


def test_a_folder_to_keep_in_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidArgument, match="not a new or empty folder"):
        ckptd.check_resume(jobs_exact.make_job, steps=5, keep=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
