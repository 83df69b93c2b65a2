from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckptd
import ckptd.errors

ERRORS = {
    name for name, value in vars(ckptd.errors).items()
    if isinstance(value, type) and value.__module__ == "ckptd.errors"
}  # fmt: skip
WITHOUT_TORCH = ERRORS | {
    "Cadence", "Resumed", "Sharding", "Ticket", "TrainState", "atomic_write_json", "check_resume", "latest_valid",
    "register_type", "verify",
}  # fmt: skip


def test_every_class_of_errors_has_its_name_in_the_package_and_costs_no_torch() -> None:
    assert {"StateMismatch", "RestoreFailed", "CorruptCheckpoint", "NothingThere", "JobFailed"} < ERRORS
    assert set(ckptd.__all__) > ERRORS
    assert all(getattr(ckptd, name) is getattr(ckptd.errors, name) for name in ERRORS)
    program = "import sys, ckptd; ckptd.StateMismatch; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=250).returncode == 0


@pytest.mark.slow
def test_a_type_checker_knows_the_errors_by_their_names_in_the_package(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "uses.py"
    file.write_text("import ckptd\n" + "".join(f"reveal_type(ckptd.{name})\n" for name in sorted(ERRORS)))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"ckptd.errors.{name}" in done.stdout for name in ERRORS), done.stdout


@pytest.mark.slow
def test_every_public_name_that_touches_tensors_refuses_an_old_torch() -> None:
    program = (
        "import torch, ckptd\n"
        "from ckptd.errors import UnsupportedTorch\n"
        "torch.__version__ = '2.5.1'\n"
        f"for name in sorted(set(ckptd.__all__) - {{'__version__'}} - {WITHOUT_TORCH!r}):\n"
        "    try:\n"
        "        getattr(ckptd, name)\n"
        "    except UnsupportedTorch:\n"
        "        continue\n"
        "    print(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    assert set(ckptd.__all__) > WITHOUT_TORCH
