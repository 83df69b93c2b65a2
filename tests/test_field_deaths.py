"""Field cases 32, 34 and 37 end to end: what is left in memory, and a daemon that dies as its trainer leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.rootdir import Root
from ckptd_places import daemon_of, end_daemon, places
from fake_daemon import wait_until

__all__ = ["places"]

pytestmark = pytest.mark.slow

_SCRIPT = """
import json, os, signal, sys, torch, ckptd
root, mode, ending = sys.argv[1:]
client = ckptd.Client(root, daemon=mode, close_timeout_s=60)
client.reserve({"weights": torch.zeros(1000)})
with open(root + "/.ckptd/daemon.json") as record:
    daemon = json.load(record)["pid"]
os.kill(daemon, signal.SIGSTOP)  # so that it dies between the receipt of the snapshot and its write
while open(f"/proc/{daemon}/stat").read().rpartition(")")[2].split()[0] != "T":
    pass
client.snapshot(7, {"weights": torch.full((1000,), 7.0)})
os.kill(daemon, signal.SIGKILL)
if mode == "attach":
    client._writer._start_timeout_s = 1.0  # nobody will come
exec(ending)
"""

ENDINGS = {
    "falls off the end": ("pass", 0),
    "sys.exit(0)": ("sys.exit(0)", 0),
    "raises": ("raise RuntimeError('boom')", 1),
}


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def run(root: Path, mode: str, ending: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SCRIPT, str(root), mode, ending]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def seven(root: Path) -> bool:
    return torch.equal(ckptd.load(root / "default" / "step-000000007")["weights"], torch.full((1000,), 7.0))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_daemon_killed_just_before_the_script_ends_is_replaced_and_the_last_step_is_durable(
    root: Path, ending: str
) -> None:
    """Field cases 34 and 37: no wait for ever, no word of failure, and the step is there when the process ends."""
    code, exit_code = ENDINGS[ending]
    done = run(root, "auto", code)
    assert done.returncode == exit_code, done.stderr
    assert "ckptd:" not in done.stderr
    assert seven(root)


def test_where_no_daemon_may_be_started_the_exit_is_loud_and_the_next_daemon_writes_it(root: Path) -> None:
    """Field cases 34 and 37: never a false "committed"; sealed means it is written."""
    ckptd.Client(root).close()
    done = run(root, "attach", ENDINGS["sys.exit(0)"][0])
    assert "step 7 may be saved or not" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (root / "default" / "step-000000007").exists()
    ckptd.Client(root).close()
    wait_until((root / "default" / "step-000000007").exists)
    assert seven(root)


def test_leftover_names_in_shared_memory_and_beside_the_socket_block_nothing(root: Path) -> None:
    """Field case 32: as file, folder and link, of our own patterns and of others; other roots' stay."""
    state: dict[str, Any] = {"weights": torch.ones(1000)}
    with ckptd.Client(root) as client:
        client.snapshot(1, state).wait(timeout_s=60)
    end_daemon(root)
    opened = Root.for_reading(root)
    slots, runtime = opened.slot_path, Path(os.environ["CKPTD_RUNTIME_DIR"])
    slots.mkdir(mode=0o700, exist_ok=True)
    for number, client_id in enumerate(("a1" * 16, "b2" * 16)):
        (slots / f"slot-{client_id}-{number}-00000000").write_bytes(b"\x00" * (8192 * number))
    (slots / f"slot-{'c3' * 16}-0-00000000").symlink_to("/nowhere")
    (slots / "notes").write_text("mine")
    other = slots.with_name(f"{slots.name[:-4]}ffff")
    other.mkdir(mode=0o700)
    (other / f"slot-{'d4' * 16}-0-00000000").write_bytes(b"\x00" * 8192)
    (runtime / f"{opened.socket_prefix}0123456789abcdef.sock").write_text("mine")
    with ckptd.Client(root) as client:
        assert client.restore(state) is not None
        client.snapshot(2, state).wait("verified", timeout_s=60)
        assert client.drain(60, verified=True) == 0
    wait_until(lambda: {path.name for path in slots.iterdir()} == {"notes", "root.json"})
    assert (slots / "notes").read_text() == "mine"
    assert len(list(other.iterdir())) == 1
    assert (runtime / f"{opened.socket_prefix}0123456789abcdef.sock").read_text() == "mine"
    assert daemon_of(root) is not None
