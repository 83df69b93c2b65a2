"""`ckptd check-resume` as a command: usage, exit codes, and that its own process stays light."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import JobFailed, TimedOut
from ckptd.proof.report import Difference, ResumeReport
from ckptd_daemon.cli import check_resume, main

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the command asks for, in place of doing it; it answers `asked["answer"]`."""
    asked: dict[str, Any] = {"answer": ResumeReport(exact=True, job="m:f", steps=9, cuts=(4,), values=3)}

    def fake(job: str, **options: Any) -> ResumeReport:
        asked.update(options, job=job)
        if isinstance(asked["answer"], Exception):
            raise asked["answer"]
        return asked["answer"]  # type: ignore[no-any-return]

    monkeypatch.setattr(check_resume, "check_resume", fake)
    path = list(sys.path)
    yield asked
    sys.path[:] = path


def test_flags_become_arguments(asked: dict[str, Any], capsys: Capsys) -> None:
    argv = [
        "check-resume",
        "m:f",
        "--steps",
        "9",
        "--cut",
        "4",
        "--cut",
        "7",
        "--timeout",
        "2m",
        "--keep",
        "k",
    ]
    assert main.main(argv) == 0
    assert (asked["job"], asked["steps"], asked["cuts"], asked["keep"]) == ("m:f", 9, [4, 7], "k")
    assert asked["timeout_s"] == 120.0
    assert capsys.readouterr().out.startswith("EXACT  m:f: killed after step 4 of 9 and resumed")
    assert sys.path[0] == str(Path.cwd())  # as `python -m` would have it


def test_without_flags_the_middle_is_cut_and_all_cuts_every_step(asked: dict[str, Any]) -> None:
    assert main.main(["check-resume", "m:f", "--steps", "9"]) == 0
    assert (asked["cuts"], asked["timeout_s"], asked["keep"]) == (None, 600.0, None)
    assert main.main(["check-resume", "m:f", "--steps", "9", "--cut", "all"]) == 0
    assert asked["cuts"] == "all"


@pytest.mark.parametrize(
    "flags",
    [[], ["--steps", "1"], ["--steps", "x"], ["--steps", "9", "--cut", "0"], ["--steps", "9", "--cut", "x"],
     ["--steps", "9", "--cut", "all", "--cut", "3"], ["--steps", "9", "--timeout", "soon"]],
)  # fmt: skip
def test_usage_errors_are_one_line_and_exit_code_2(
    asked: dict[str, Any], capsys: Capsys, flags: list[str]
) -> None:
    assert main.main(["check-resume", "m:f", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "job" not in asked


def test_a_difference_is_exit_code_1_and_never_moves_the_cursor(
    asked: dict[str, Any], capsys: Capsys
) -> None:
    found = Difference(
        phase="resumed", cut=4, step=5, kind="data", where="state['x']", seen="\x1b[2J", wanted="1", why="so"
    )
    asked["answer"] = ResumeReport(exact=False, job="m:f", steps=9, cuts=(4,), differences=(found,))
    assert main.main(["check-resume", "m:f", "--steps", "9"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out and "state['x']" in out


@pytest.mark.parametrize(("error", "code"), [(JobFailed("it failed"), 1), (TimedOut("too long"), 7)])
def test_a_job_that_fails_shows_its_output_before_the_one_line(
    asked: dict[str, Any], capsys: Capsys, error: Exception, code: int
) -> None:
    error.add_note("Traceback\n  in the job")
    asked["answer"] = error
    assert main.main(["check-resume", "m:f", "--steps", "9"]) == code
    assert capsys.readouterr().err == f"Traceback\n  in the job\nckptd: {error}\n"


def test_a_wrong_address_costs_no_torch() -> None:
    program = (
        "import sys\n"
        "from ckptd_daemon.cli.main import main\n"
        "code = main(['check-resume', 'nowhere.py:f', '--steps', '9'])\n"
        "sys.exit(f'loaded {sys.modules.keys() & {\"torch\", \"numpy\"}}' if {'torch', 'numpy'} & set(sys.modules) "
        "else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 2, done.stderr
    assert "nowhere.py: no such file" in done.stderr
