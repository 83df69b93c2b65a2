from __future__ import annotations

import subprocess
import sys

import pytest

import ckptd

WITHOUT_TORCH = {
    "CkptdError", "CheckpointWarning", "Cadence", "Resumed", "Sharding", "Ticket", "TrainState",
    "atomic_write_json", "check_resume", "latest_valid", "register_type", "verify",
}  # fmt: skip


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    assert set(ckptd.__all__) > WITHOUT_TORCH
