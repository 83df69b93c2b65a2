"""`ckptd start, stop, drain, status` against a real daemon process, with a real client."""

from __future__ import annotations

import json
import os
import re
import signal
import tomllib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckptd as library
from ckptd.disk.rootdir import Root
from ckptd_daemon.cli import status
from live_daemon import ckptd, detached, end, files_of_run, foreground, record_of, wait_until
from made_series import flip_byte
from told_signals import stop

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CKPTD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path / "shm"))
    for name in ("CKPTD_ROOT", "CKPTD_RUN", "CKPTD_KEEP_LAST", "CKPTD_KEEP_BEST", "CKPTD_MONITOR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "root"
    yield folder
    end(folder)


def save(root: Path, *steps: int, run: str = "default", close: bool = True) -> library.Client:
    client = library.Client(root=root, run=run, daemon="attach")
    state = {"model": {"w": torch.arange(1000.0)}, "train": {"step": 0}}
    for step in steps:
        state["train"]["step"] = step
        client.snapshot(step, state, metrics={"loss": 1.0 / step})
    client.drain(60)
    if close:
        client.close()
    return client


def test_start_detached_prints_endpoint_pid_and_log_when_it_is_ready(root: Path) -> None:
    done = ckptd("start", "--detach", "--root", root)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    record = record_of(root)
    assert (done.returncode, done.stderr) == (0, "") and record is not None
    assert said == {"endpoint": record.endpoint, "pid": str(record.pid), "log": record.log}
    assert Path(record.endpoint.removeprefix("ipc://")).is_socket()


def test_start_detached_as_json(root: Path) -> None:
    said = json.loads(ckptd("start", "--detach", "--json", "--root", root).stdout)
    record = record_of(root)
    assert record is not None
    assert (said["schema"], said["pid"], said["root"]) == ("ckpt.v2-start", record.pid, str(root))


def test_start_in_the_foreground_prints_one_line_per_snapshot(root: Path) -> None:
    with foreground(root) as process:
        save(root, 100, 200)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=250)
    lines = [line for line in out.splitlines() if " step " in line]
    assert (process.returncode, err) == (0, "")
    assert len(lines) == 2 and "step 100" in lines[0] and "step 200" in lines[1]
    assert all("committed" in line for line in lines)


def test_stop_waits_until_the_process_is_gone_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    with detached(root) as record:
        save(root, 1)
        done = ckptd("stop", "--root", root)
        assert done.returncode == 0 and not record.alive()
        assert not (root / ".ckptd" / "daemon.json").exists()
    left = [path for folder in ("run", "shm") for path in (tmp_path / folder).rglob("*") if not path.is_dir()]
    assert left == []
    assert [path.name for path in (root / "default").iterdir() if path.name.startswith(".")] == []


def test_stop_of_a_daemon_that_hangs_is_bounded(root: Path) -> None:
    with detached(root) as record:
        stop(record.pid)
        done = ckptd("stop", "--timeout", "1s", "--root", root)
        assert done.returncode == 7 and done.stderr.count("\n") == 1
        os.kill(record.pid, signal.SIGCONT)


def test_drain_of_a_daemon_that_hangs_is_bounded(root: Path) -> None:
    with detached(root) as record:
        stop(record.pid)
        assert ckptd("drain", "--timeout", "1s", "--root", root).returncode == 7
        os.kill(record.pid, signal.SIGCONT)


def test_drain_waits_for_what_was_accepted(root: Path) -> None:
    with detached(root):
        client = library.Client(root=root, run="gpt", daemon="attach")
        client.snapshot(5, {"model": {"w": torch.zeros(500_000)}})
        done = ckptd("drain", "--verified", "--root", root)
        assert (done.returncode, done.stdout) == (0, "")
        assert ckptd("latest", "--no-wait", "--run", "gpt", "--root", root).stdout.endswith(
            "step-000000005\n"
        )
        client.close()


def test_status_shows_the_daemon_its_clients_and_their_newest_checkpoints(root: Path) -> None:
    with detached(root) as record:
        client = save(root, 100, 200, run="gpt", close=False)
        client.drain(60, verified=True)
        done = ckptd("status", "--root", root)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"pid {record.pid}" in done.stdout.splitlines()[0]
        assert f"gpt\tpid {os.getpid()}\t0\tstep-000000200\tstep-000000200\t0\t\n" in done.stdout
        data = json.loads(ckptd("status", "--json", "--root", root).stdout)
        assert (data["schema"], data["daemon"]["pid"]) == ("ckpt.v2-status", record.pid)
        assert data["runs"][0]["client"]["pid"] == os.getpid()
        client.close()


def test_status_shows_how_files_are_written_how_fast_they_may_and_whether_somebody_waits(root: Path) -> None:
    with detached(root, "--max-write-rate", "2MB", "--scrub-every", "0"):
        done = ckptd("status", "--root", root)
        assert "scrub\tnever\n" in done.stdout
        assert re.search(r"^writing\t(direct|early|plain).*\tat most 1\.9 MiB/s$", done.stdout, re.M)
        with library.Client(root=root, daemon="attach") as client:
            ticket = client.snapshot(1, {"model": {"w": torch.zeros(10 * 2**18)}})
            wait_until(lambda: client.status()["runs"][0]["queue"])
            assert client.status()["writing"]["urgent"] is False
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(ticket.wait, timeout_s=60)
                wait_until(lambda: client.status()["writing"]["urgent"])
                assert not waiting.done()
                assert waiting.result(60).path is not None
            wait_until(lambda: not client.status()["writing"]["urgent"])
    assert (
        tomllib.loads((root / ".ckptd" / "ckptd.toml").read_text())["writing"]["max_write_rate"] == 2_000_000
    )


def test_a_rate_or_period_that_can_not_be_is_refused_before_anything_is_touched(root: Path) -> None:
    for flag, values in (("max-write-rate", ("fast", "10kB", "-1")), ("scrub-every", ("30m", "0.5s"))):
        for value in values:
            assert ckptd("start", "--detach", f"--{flag}={value}", "--root", root).returncode == 2
    assert not root.exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "every 7d00h"),
        ({"due": 3, "late": 2}, "every 7d00h\t9 checkpoints\t3 due, 2 of them late\tnext in 1h00m"),
        ({"reading": "r/x", "read_bytes": 2**20}, "9 checkpoints\treading r/x, 1.0 MiB so far\n"),
        ({"reading": "r/x", "read_bytes": 0, "gives_way": True}, "so far, waits for writes\n"),
        ({"oldest_s": 0.0, "next_s": None}, "9 checkpoints, all read since 20"),
        ({"found": 1, "last_found": "r/x: \033y"}, "\t1 found corrupt, last r/x: \\x1by\n"),
        ({"unread": 1, "last_unread": "EIO"}, "\t1 can't be read: EIO\n"),
    ],
)
def test_status_says_what_the_scrub_does_and_has_found(more: dict[str, Any], says: str) -> None:
    known = {"checkpoints": 9, "due": 0, "late": 0, "oldest_s": None, "next_s": 3600.0} if more else {}
    shown = status._scrub_line({"every_s": 7 * 86_400} | known | more)
    assert shown.startswith("scrub\tevery 7d00h") and says in shown


def test_status_after_a_restart_still_knows_the_newest_checkpoints(root: Path) -> None:
    with detached(root):
        save(root, 100, run="gpt")
        ckptd("drain", "--verified", "--root", root)
        ckptd("stop", "--root", root)
    with detached(root):
        assert "gpt\t-\t0\tstep-000000100\tstep-000000100\t0" in ckptd("status", "--root", root).stdout


def test_status_says_what_the_scan_at_the_start_found(root: Path) -> None:
    with detached(root):
        save(root, 100, 200, run="gpt")
        ckptd("drain", "--verified", "--root", root)
        ckptd("stop", "--root", root)
    flip_byte(root / "gpt" / "step-000000200" / "index.json")
    with detached(root):
        said = ckptd("status", "--root", root).stdout
        assert "step-000000200" in said.splitlines()[-1].split("\t")[-1]


def test_status_names_a_slot_that_may_hold_a_snapshot_and_cannot_be_read(root: Path) -> None:
    slot = Root.open(root, create=True).slot_dir() / f"slot-{'ab' * 16}-0-00000000"
    slot.write_bytes(b"x" * 8192)
    slot.chmod(0o600)
    with detached(root):
        said = ckptd("status", "--root", root).stdout
        (unread,) = json.loads(ckptd("status", "--json", "--root", root).stdout)["daemon"]["slots_unread"]
        assert unread["name"] == slot.name and "no whole header" in unread["reason"]
        assert f"slots\t{slot.name} can't be read, kept: " in said
        ckptd("stop", "--root", root)
    assert slot.exists()
    slot.unlink()


def test_policy_flags_are_written_and_hold_for_later_starts(root: Path) -> None:
    with detached(root, "--keep-last", "2", "--keep-best", "1", "--monitor", "loss:min"):
        ckptd("stop", "--root", root)
    settings = tomllib.loads((root / ".ckptd" / "ckptd.toml").read_text())
    assert settings["policy"] == {"keep_last": 2, "keep_best": 1, "monitor": "loss", "mode": "min"}
    with detached(root):
        save(root, 1, 2, 3, 4)
        ckptd("drain", "--verified", "--root", root)
        wait_until(lambda: len(list((root / "default").glob("step-*"))) == 2)
        ckptd("stop", "--root", root)
    assert tomllib.loads((root / ".ckptd" / "ckptd.toml").read_text()) == settings


def test_the_budget_is_written_shown_and_holds_until_it_is_taken_back(root: Path) -> None:
    settings = root / ".ckptd" / "ckptd.toml"
    with detached(root, "--max-staged-bytes", "1GB", "--max-client-bytes", "64MiB"):
        client = save(root, 1, close=False)
        data = json.loads(ckptd("status", "--json", "--root", root).stdout)
        memory, slots = data["memory"], data["runs"][0]["slots"]
        assert (memory["max_staged_bytes"], memory["max_client_bytes"]) == (10**9, 64 * 2**20)
        assert memory["staged_bytes"] == sum(slot["bytes"] for slot in slots) > 0
        lines = {line.split("\t")[0]: line for line in ckptd("status", "--root", root).stdout.splitlines()}
        assert "staged (at most 953.7 MiB, 64.0 MiB a client)\t" in lines["memory"]
        assert re.search(r" free: .*\tdefault: 2 slots of \d+\.\d [KM]iB$", lines["memory"])
        with pytest.raises(
            library.OverBudget, match=r"max_client_bytes: .*: 2 slots of .* MiB for run default"
        ):
            client.reserve({"model": {"w": torch.empty(2**24)}})
        assert client.snapshot(2, {"model": {"w": torch.ones(3)}}).wait(timeout_s=60).committed
        client.close()
        log = (root / ".ckptd" / "daemon.log").read_text()
        assert re.search(r"slots\.making run=default what='2 slots of .*' bytes=\d+ where=/", log)
    staging = {"max_staged_bytes": 10**9, "max_client_bytes": 64 * 2**20}
    assert tomllib.loads(settings.read_text())["staging"] == staging
    with detached(root, "--max-client-bytes", "0"):
        ckptd("stop", "--root", root)
    after = tomllib.loads(settings.read_text())
    assert after["staging"] == {"max_staged_bytes": 10**9} and after["policy"]["keep_last"] == 5
    refused = ckptd("start", "--root", root, "--max-staged-bytes", "much")
    assert refused.returncode == 2 and "--max-staged-bytes" in refused.stderr


def test_a_flag_beats_the_environment_which_beats_the_settings(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> tuple[int, int]:
        with detached(root, *flags):
            ckptd("stop", "--root", root)
        policy = tomllib.loads((root / ".ckptd" / "ckptd.toml").read_text())["policy"]
        return policy["keep_last"], policy["keep_best"]

    flags = ["--keep-last", "7", "--monitor", "loss:min"]
    assert kept() == (7, 0)
    monkeypatch.setenv("CKPTD_KEEP_LAST", "8")
    monkeypatch.setenv("CKPTD_KEEP_BEST", "3")
    flags = []
    assert kept() == (8, 3)
    flags = ["--keep-last", "9"]
    assert kept() == (9, 3)


def test_a_policy_may_be_one_runs_own(root: Path) -> None:
    with detached(root, "--run", "gpt", "--keep-last", "2"):
        save(root, 1, 2, 3, run="gpt")
        save(root, 1, 2, 3, run="other")
        ckptd("drain", "--verified", "--root", root)
        wait_until(lambda: len(list((root / "gpt").glob("step-*"))) == 2)
        assert len(list((root / "other").glob("step-*"))) == 3


def test_an_idle_daemon_leaves_when_told_so(root: Path) -> None:
    with foreground(root, "--idle-exit", "1s") as process:
        assert process.wait(60) == 0


def test_queries_beside_a_living_daemon_change_nothing(root: Path) -> None:
    with detached(root):
        save(root, 100)
        ckptd("drain", "--verified", "--root", root)
        wait_until(lambda: "verified" in ckptd("list", "--root", root).stdout)
        before = files_of_run(root / "default")
        for argv in (["list"], ["latest"], ["show", "latest"], ["verify", "--all"], ["status"]):
            assert ckptd(*argv, "--root", root).returncode == 0
        assert files_of_run(root / "default") == before


def test_interrupting_the_foreground_writes_what_was_accepted(root: Path) -> None:
    with foreground(root, "--grace", "0") as process:
        client = library.Client(root=root, daemon="attach", close_timeout_s=1)
        ticket = client.snapshot(1, {"model": {"w": torch.zeros(1_000_000)}})
        wait_until(lambda: ticket.state != "unknown" and ticket.sequence is not None)  # accepted
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert ckptd("latest", "--root", root).stdout == f"{root}/default/step-000000001\n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.CheckpointWarning)
            client.close()


def test_within_the_grace_an_attached_client_is_served_after_the_signal(root: Path) -> None:
    with foreground(root, "--grace", "60") as process:
        client = library.Client(root=root, daemon="attach")
        client.snapshot(1, {"model": {"w": torch.zeros(1000)}})
        process.send_signal(signal.SIGTERM)
        ticket = client.snapshot(2, {"model": {"w": torch.ones(1000)}})
        ticket.wait("committed", timeout_s=60)
        client.close()
        assert process.wait(60) == 0
        assert ckptd("latest", "--root", root).stdout == f"{root}/default/step-000000002\n"


def test_help_is_quick_and_needs_nothing(tmp_path: Path) -> None:
    done = ckptd("start", "--help")
    assert done.returncode == 0 and re.search(r"--keep-last N", done.stdout)
