"""What bad input gets: one clear line, the exit code of the table, and nothing changed on disk."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptd as library
from ckptd import errors
from ckptd.disk.rootdir import DaemonRecord, Root, process_started
from live_daemon import ckptd, detached, end, files_below, files_of_run, record_of, wait_until
from made_series import Made

_DROP_FROM_BOUNDING_SET, _DAC_OVERRIDE = 24, 1


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "shm"))
    for name in ("CKPTD_ROOT", "CKPTD_RUN", "CKPTD_KEEP_LAST", "CKPTD_KEEP_BEST", "CKPTD_MONITOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "place" / "root"
    yield folder
    end(folder)


def refused(done: subprocess.CompletedProcess[str], exit_code: int, *said: str) -> None:
    """One line on stderr that says all of `said`, nothing on stdout, that exit code."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    assert done.stderr.startswith("ckptd: ") and done.stderr.count("\n") == 1
    for text in said:
        assert text in done.stderr


def as_mere_mortal() -> None:
    """In the child: even root obeys file modes."""
    ctypes.CDLL(None, use_errno=True).prctl(_DROP_FROM_BOUNDING_SET, _DAC_OVERRIDE, 0, 0, 0)


# --- the root -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["start", "start --detach"])
def test_an_unwritable_root_is_refused(root: Path, how: str) -> None:
    root.mkdir(parents=True)
    root.chmod(0o500)
    done = ckptd(*how.split(), "--root", root, preexec_fn=as_mere_mortal)
    refused(done, 2, str(root), "can't be written", "pick another folder")
    assert files_below(root) == {}


def test_a_root_that_cant_be_made_is_refused(root: Path) -> None:
    root.parent.mkdir()
    root.parent.chmod(0o500)
    refused(ckptd("start", "--root", root, preexec_fn=as_mere_mortal), 2, str(root), "Permission denied")
    assert not root.exists()


@pytest.mark.parametrize("how", ["start", "start --detach"])
def test_a_root_where_no_folder_can_be_is_refused_with_the_systems_reason(how: str) -> None:
    done = ckptd(*how.split(), "--root", "/proc/x")
    refused(done, 2, "/proc/x: the root can't be made", "No such file or directory: '/proc/x'")


def test_a_client_that_insists_on_a_daemon_of_a_missing_root_is_told_who_makes_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.parent.mkdir()
    monkeypatch.chdir(root.parent)
    with pytest.raises(errors.BadRoot, match="no such folder") as caught:
        library.Client(root="root", daemon="attach")
    assert caught.value.where == str(root)
    assert f"ckptd start --root {root} --detach" in caught.value.todo
    assert 'daemon="auto"' in caught.value.todo


@pytest.mark.parametrize("command", ["start", "start --detach", "status", "list", "stop", "drain", "latest"])
def test_a_root_that_is_a_file_is_refused(root: Path, command: str) -> None:
    root.parent.mkdir()
    root.write_text("precious")
    refused(ckptd(*command.split(), "--root", root), 2, str(root), "a file, not a folder")
    assert root.read_text() == "precious"


def test_a_root_below_a_file_is_refused(root: Path) -> None:
    root.parent.write_text("precious")
    refused(ckptd("start", "--root", root), 2, "a file, not a folder")
    assert root.parent.read_text() == "precious"


QUERIES = {
    "list": 3, "latest": 3, "latest --no-wait": 3, "show latest": 3, "show best --monitor x:min": 3, "show 7": 3,
    "verify --all": 3, "verify 7": 3, "status": 5, "stop": 5, "drain": 5,
}  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_doesnt_make_a_root_and_a_missing_one_holds_nothing(root: Path, query: str) -> None:
    refused(ckptd(*query.split(), "--root", root), QUERIES[query], str(root), "no such folder")
    assert not root.parent.exists()


# --- one writer per root --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["start", "start --detach", "start --keep-last 1"])
def test_a_second_daemon_leaves_with_its_own_exit_code_and_touches_nothing(root: Path, how: str) -> None:
    with detached(root, "--keep-last", "3") as record:
        wait_until(lambda: "daemon.ready" in Path(record.log).read_text())  # its last word for now
        before = files_below(root)
        refused(ckptd(*how.split(), "--root", root), 6, str(root), f"pid {record.pid}", record.endpoint)
        assert files_below(root) == before
        assert record_of(root) == record


@pytest.mark.slow
def test_a_second_live_client_is_refused_and_the_first_goes_on(root: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"model": {"w": torch.zeros(100)}}
    program = (
        "import sys, ckptd, torch\n"
        "try:\n"
        "    with ckptd.Client(root=sys.argv[1], run='gpt', daemon='attach') as client:\n"
        "        client.snapshot(7, {'model': {'w': torch.zeros(100)}})\n"
        "except ckptd.errors.CkptdError as error:\n"
        "    print(error, file=sys.stderr)\n"
        "    sys.exit(error.exit_code)\n"
    )
    with detached(root), library.Client(root=root, run="gpt", daemon="attach") as client:
        client.snapshot(1, state).wait("verified", timeout_s=60)
        before = files_of_run(root / "gpt")
        command = [sys.executable, "-c", "import ckptd.errors\n" + program, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == errors.RunTaken.exit_code == 6, done.stderr
        assert "gpt" in done.stderr and f"pid {os.getpid()}" in done.stderr and "Traceback" not in done.stderr
        assert files_of_run(root / "gpt") == before
        client.snapshot(2, state).wait("committed", timeout_s=60)


# --- no daemon, wrong endpoint --------------------------------------------------------------------


@pytest.mark.parametrize("command", ["stop", "drain"])
def test_no_daemon_is_said_with_what_to_do(root: Path, command: str) -> None:
    Made(root).commit(100)
    before = files_below(root)
    refused(ckptd(command, "--root", root), 5, str(root), "no daemon", "ckptd start")
    assert files_below(root) == before


def test_a_client_that_insists_on_a_daemon_gets_none(root: Path) -> None:
    Made(root).commit(100)
    before = files_below(root)
    with pytest.raises(errors.NoDaemon, match="ckptd start"):
        library.Client(root=root, daemon="attach", start_timeout_s=0.5)
    assert files_below(root) == before


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Pid of a process that lives and does nothing."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def _publish(root: Root, endpoint: str, pid: int) -> None:
    """daemon.json that names a living process and an endpoint."""
    DaemonRecord(
        endpoint=endpoint, pid=pid, pid_started=process_started(pid) or 0,
        daemon_id="wrong", started_at=time.time(), version="0", log="/nowhere/daemon.log",
    ).write(root)  # fmt: skip


def _nothing(path: Path) -> str:
    return f"ipc://{path}"


def _regular_file(path: Path) -> str:
    path.write_text("precious")
    return f"ipc://{path}"


def _other_transport(path: Path) -> str:
    return "tcp://127.0.0.1:9"


@pytest.mark.parametrize("make", [_nothing, _regular_file, _other_transport])
@pytest.mark.parametrize("command", ["status", "stop", "drain"])
def test_a_wrong_endpoint_is_no_daemon(
    root: Path, tmp_path: Path, sleeper: int, make: Callable[[Path], str], command: str
) -> None:
    opened = Root.open(root, create=True)
    endpoint = make(tmp_path / "e.sock")
    _publish(opened, endpoint, sleeper)
    before = files_below(tmp_path)
    done = ckptd(command, "--root", root)
    assert done.returncode == 5 and endpoint in done.stderr and done.stderr.count("\n") == 1
    assert files_below(tmp_path) == before


def test_an_endpoint_where_nobody_answers_is_bounded(root: Path, tmp_path: Path, sleeper: int) -> None:
    opened = Root.open(root, create=True)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen()
        _publish(opened, f"ipc://{tmp_path / 'deaf.sock'}", sleeper)
        began = time.monotonic()
        done = ckptd("drain", "--timeout", "1", "--root", root)
        refused(done, 7, str(root), f"pid {sleeper}")
        assert time.monotonic() - began < 40


# --- names, steps, states, policies ---------------------------------------------------------------

BAD_RUNS = ["", "UPPER", "a/b", "..", ".hidden", "-x", "a" * 65, "quarantine", "decisions", "é", "a b", "a\n"]


@pytest.mark.parametrize("name", BAD_RUNS)
@pytest.mark.parametrize("command", ["list", "latest", "start"])
def test_a_bad_run_name_is_refused(root: Path, command: str, name: str) -> None:
    Made(root).commit(100)
    before = files_below(root)
    done = ckptd(command, f"--run={name}", "--root", root)
    refused(done, 2, "not a run name", "wanted 1 to 64")
    assert files_below(root) == before


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_client_with_a_bad_run_name_is_refused(root: Path, name: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="not a run name"):
        library.Client(root=root, run=name, daemon="off")
    assert not root.exists()


@pytest.mark.parametrize("step", [-1, 10**15 + 1, 1.5, "7", None, True])
def test_a_bad_step_is_refused(root: Path, step: Any) -> None:
    with library.Client(root=root, daemon="off") as client:
        client.snapshot(1, {"train": {"x": 1}})
        before = files_below(root / "default")
        with pytest.raises(errors.InvalidArgument, match="step"):
            client.snapshot(step, {"train": {"x": 2}})
        assert files_below(root / "default") == before


def test_a_leaf_that_cant_be_stored_is_named_and_later_snapshots_work(root: Path) -> None:
    with library.Client(root=root, daemon="off") as client:
        client.snapshot(1, {"train": {"x": 1}})
        before = files_below(root / "default")
        with pytest.raises(errors.UnstorableState, match=r"\['train'\]\['hook'\]"):
            client.snapshot(2, {"train": {"x": 1, "hook": lambda: None}})
        assert files_below(root / "default") == before
        client.snapshot(3, {"train": {"x": 3}})
    found = library.latest_valid(root)
    assert found is not None and found.step == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--keep-last 0", "keep nothing"),
        ("--keep-last 0 --keep-best 0", "keep nothing"),
        ("--keep-best 1", "--monitor"),
        ("--monitor val_loss", "min or max"),
        ("--monitor :min", "min or max"),
        ("--keep-last -1", "not a count"),
        ("--keep-last many", "not a count"),
        ("--grace soon", "duration"),
        ("--idle-exit 5GB", "unit"),
        ("--keep-every 6h", "unrecognized"),
    ],
)
@pytest.mark.parametrize("how", ["start", "start --detach"])
def test_a_policy_that_cant_be_is_refused_before_anything_is_made(
    root: Path, how: str, flags: str, said: str
) -> None:
    refused(ckptd(*how.split(), *flags.split(), "--root", root), 2, said)
    assert not root.parent.exists()


def test_a_policy_that_keeps_nothing_together_with_what_is_written_is_refused(root: Path) -> None:
    Made(root).commit(100)
    (root / ".ckptd" / "ckptd.toml").write_text(
        "[policy]\nkeep_last = 0\nkeep_best = 1\nmonitor = 'x'\nmode = 'min'\n"
    )
    before = files_below(root)
    refused(ckptd("start", "--keep-best", "0", "--root", root), 2, "keep nothing")
    assert files_below(root) == before


@pytest.mark.parametrize("text", ["[policy]\nkeep_lots = 5\n", "not toml", "[policy]\nkeep_last = 0\n"])
@pytest.mark.parametrize("how", ["start", "start --detach"])
def test_a_settings_file_that_is_wrong_is_said_and_left_alone(root: Path, how: str, text: str) -> None:
    Made(root).commit(100)
    (root / ".ckptd" / "ckptd.toml").write_text(text)
    before = {name: data for name, data in files_below(root).items() if not name.endswith("lock")}
    refused(ckptd(*how.split(), "--root", root), 2, "ckptd.toml")
    after = {name: data for name, data in files_below(root).items() if not name.endswith("lock")}
    assert after == before


def test_an_error_keeps_its_four_parts_as_attributes() -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        library.Client(root="/x", run="UPPER", daemon="off")
    error = caught.value
    assert error.what and error.where == "run" and error.seen == "'UPPER'" and error.wanted and error.todo
