"""How a client ends: the script falls off its end, exits, raises; forked children; Ctrl-C for the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.disk.rootdir import Root
from ckptd.errors import ClientClosed
from ckptd_places import daemon_of, places
from fake_daemon import FakeDaemon, wait_until
from open_files import open_files
from told_signals import hearing_ctrl_c

__all__ = ["places"]

SCRIPT = """
import sys, torch, ckptd
root, ending = sys.argv[1:]
client = ckptd.Client(root, close_timeout_s=30)
ticket = client.snapshot(7, {"weights": torch.arange(300_000.0)})
print("staged", flush=True)
"""

STOP_DAEMON = """
client.reserve({"weights": torch.arange(300_000.0)})
import os, json, signal
with open(root + "/.ckptd/daemon.json") as record:
    pid = json.load(record)["pid"]
os.kill(pid, signal.SIGSTOP)
while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
    pass
ticket ="""

ENDINGS = {
    "falls off the end": ("", 0),
    "sys.exit(0)": ("sys.exit(0)", 0),
    "sys.exit(3)": ("sys.exit(3)", 3),
    "raises": ("raise RuntimeError('boom')", 1),
    "with block raises": ("with client:\n    raise RuntimeError('boom')", 1),
    "drops the client": ("del client, ticket\nimport gc; gc.collect()", 0),
}


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def run(root: Path, code: str, *, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    """A script of its own; without torch's CUDA look-ups, and with warnings as a user sees them."""
    return subprocess.run(
        [sys.executable, "-c", code, str(root), ""],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_however_the_script_ends_its_last_accepted_step_is_durable(root: Path, ending: str) -> None:
    code, exit_code = ENDINGS[ending]
    done = run(root, SCRIPT + code)
    assert done.returncode == exit_code, done.stderr
    assert "staged" in done.stdout
    assert "ckptd:" not in done.stderr
    path = root / "default" / "step-000000007"
    assert torch.equal(ckptd.load(path)["weights"], torch.arange(300_000.0))


@pytest.mark.slow
def test_an_exit_that_could_not_save_is_loud_and_bounded(root: Path) -> None:
    code = SCRIPT.replace("close_timeout_s=30", "close_timeout_s=0.5").replace("ticket =", STOP_DAEMON)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root), ""], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "staged\n"
        began = time.monotonic()
        _, errors = trainer.communicate(timeout=250)
    assert time.monotonic() - began < 30  # of its end alone: its start takes a busy machine as long
    assert "step 7 may be saved or not" in errors
    assert "Traceback" not in errors
    record = daemon_of(root)
    assert record is not None
    os.kill(record.pid, signal.SIGCONT)
    wait_until(lambda: (root / "default" / "step-000000007").exists())


@pytest.mark.slow
def test_a_with_block_that_raises_shows_its_own_error_and_warns_about_the_snapshot(root: Path) -> None:
    code = SCRIPT.replace("close_timeout_s=30", "close_timeout_s=0.5, on_error='raise'").replace(
        "ticket =", STOP_DAEMON
    )
    done = run(root, code + ENDINGS["with block raises"][0])
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: boom")
    assert "CheckpointWarning: " in done.stderr
    assert "step 7" in done.stderr
    record = daemon_of(root)
    assert record is not None
    os.kill(record.pid, signal.SIGCONT)


@pytest.mark.slow
def test_the_daemon_does_not_hold_the_trainers_pipe_and_has_a_session_of_its_own(root: Path) -> None:
    done = run(
        root, SCRIPT
    )  # returns at the end of the pipe: a daemon that held it would keep it open for a minute
    assert done.returncode == 0
    record = daemon_of(root)
    assert record is not None
    assert os.getsid(record.pid) == record.pid
    own_pipes = open_files(os.getpid())
    assert not [
        target for target in open_files(record.pid) if target.startswith("pipe:") and target in own_pipes
    ]


@pytest.mark.slow
def test_ctrl_c_for_the_whole_group_in_the_middle_of_a_snapshot_saves_it(root: Path) -> None:
    code = (
        SCRIPT.replace("ticket =", "client.__enter__()\nticket =")
        + "\nimport time\nwith client:\n    time.sleep(60)"
    )
    with hearing_ctrl_c():
        trainer = subprocess.Popen(
            [sys.executable, "-c", code, str(root), ""],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "staged\n"
        os.killpg(trainer.pid, signal.SIGINT)
        _, errors = trainer.communicate(timeout=250)
    assert "KeyboardInterrupt" in errors
    assert "CheckpointWarning" not in errors
    assert (root / "default" / "step-000000007").is_dir()


# --- forks ----------------------------------------------------------------------------------------


def in_child(act: object) -> int:
    """Run `act` in a forked child that ends as a script does; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        signal.alarm(60)  # a child that hangs dies of it
        try:
            assert callable(act)
            code = int(act() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_forked_child_can_not_use_the_client_and_its_end_harms_nothing(root: Path, mode: str) -> None:
    state = {"weights": torch.arange(1000.0)}
    with ckptd.Client(root, daemon=mode) as client:  # type: ignore[arg-type]
        client.snapshot(1, state)

        def child() -> int:
            for call in (
                lambda: client.snapshot(2, state),
                lambda: client.wait(),
                lambda: client.restore(state),
            ):
                try:
                    call()
                except ClientClosed as error:
                    assert "parent" in str(error)
                else:
                    return 1
            client.close()
            with client:
                pass
            client._ending()  # what the end of the interpreter does
            client._writer.look()
            return 0

        assert in_child(child) == 0
        assert client.snapshot(3, state).wait(timeout_s=30).committed
    assert [one.step for one in client.checkpoints()] == [1, 3]


def test_a_fork_while_another_thread_is_in_the_client_leaves_a_child_that_does_not_hang(root: Path) -> None:
    with FakeDaemon(Root.open(root, create=True)), ckptd.Client(root, daemon="attach") as client:
        inside, leave = threading.Event(), threading.Event()

        def hold() -> None:
            with client._writer.lock:
                inside.set()
                leave.wait(100)

        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(60)
        try:
            assert in_child(lambda: client._writer.look()) == 0
        finally:
            leave.set()
            thread.join()


@pytest.mark.slow
def test_a_child_that_ends_as_a_script_of_its_own_harms_nothing(root: Path) -> None:
    code = SCRIPT + (
        "import os\npid = os.fork()\nif pid == 0:\n    sys.exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "client.snapshot(8, {'weights': torch.ones(3)}).wait(timeout_s=30)\nclient.close()\nprint('closed')"
    )
    done = run(root, code)
    assert done.returncode == 0, done.stderr
    assert "closed" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_dataloader_workers_with_an_open_client_harm_nothing(root: Path) -> None:
    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(float(index))

    state = {"weights": torch.arange(1000.0)}
    with ckptd.Client(root) as client:
        for epoch in range(2):
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
            for batch, _ in enumerate(loader):
                client.snapshot(epoch * 4 + batch + 1, state)
        client.wait(60)
        assert [one.step for one in client.checkpoints()][-1] == 8


@pytest.mark.slow
def test_a_worker_that_outlives_its_killed_trainer_does_not_hold_the_root(root: Path) -> None:
    code = """
import os, sys, time, torch, ckptd
client = ckptd.Client(sys.argv[1], daemon="off")
client.snapshot(1, {"weights": torch.ones(3)})
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        trainer.kill()
    try:
        with ckptd.Client(root, daemon="off") as client:
            assert [one.step for one in client.checkpoints()] == [1]
    finally:
        os.kill(worker, signal.SIGKILL)
