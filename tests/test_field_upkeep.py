"""Field cases 10, 11, 12, 13, 15, 17, 18 and 19 end to end: what lies in a root, and a daemon that is started on it."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptd
from ckptd.disk.series import checkpoints
from ckptd.names import quarantine_folder, work_folder
from ckptd_places import end_daemon, places
from fake_daemon import wait_until
from live_daemon import detached
from paths_below import paths_below

__all__ = ["places"]

pytestmark = pytest.mark.slow


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((100,), float(step)), "counter": step}


def save(root: Path, *steps: int, **options: Any) -> None:
    """Save steps with a client of its own, each verified."""
    with ckptd.Client(root, **options) as client:
        for step in steps:
            client.snapshot(step, state_of(step)).wait("verified", timeout_s=60)


def steps_of(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-").lstrip("0") for path in (root / "default").glob("step-*"))


@pytest.mark.parametrize(("mask", "file_mode", "dir_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_files_have_the_modes_of_the_trainers_umask_and_tmpdir_plays_no_part(
    root: Path, monkeypatch: pytest.MonkeyPatch, mask: int, file_mode: int, dir_mode: int
) -> None:
    """Field case 10, with the daemon that the client started: the one that writes."""
    elsewhere = Path(os.environ["CKPTD_SHM_DIR"]) / "tmp"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    before = os.umask(mask)
    try:
        save(root, 1, sharding=ckptd.Sharding(shards=2))
    finally:
        os.umask(before)
    folder = root / "default" / "step-000000001"
    assert stat.S_IMODE(folder.stat().st_mode) == dir_mode
    wait_until((root / "default" / "index.json").exists)
    files = [*folder.iterdir(), root / "default" / "index.json", *(root / "default" / "decisions").iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {file_mode}
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link to nowhere", "link to a checkpoint"])
def test_leftovers_of_every_temporary_name_hinder_neither_a_start_nor_a_save(root: Path, kind: str) -> None:
    """Field case 11: what the patterns name is swept at the start, links not followed; the rest stays."""
    save(root, 1)
    end_daemon(root)
    run = root / "default"
    for folder in (run, run / "decisions", root / ".ckptd"):
        for name in (work_folder("tmp", 2), work_folder("trash", 3), work_folder("tmp", 0), ".tmp-x", ".tmp"):
            leave(folder / name, kind, run / "step-000000001")
    (run / "quarantine").mkdir()
    leave(run / "quarantine" / quarantine_folder("step-000000009", 4), kind, run / "step-000000001")
    save(root, 2)
    assert steps_of(root) == ["1", "2"]
    found = ckptd.latest_valid(root)
    assert found is not None
    assert (found.step, found.sequence) == (2, 5)
    assert ckptd.verify(run / "step-000000001").ok
    # The run's index is written beside, by way of such a name.
    wait_until(lambda: [p.name for p in paths_below(root) if p.match(".t*-*") and p.name != ".tmp-x"] == [])


def leave(path: Path, kind: str, checkpoint: Path) -> None:
    if kind == "file":
        path.write_text("half")
    elif kind == "folder":
        path.mkdir()
        (path / "ckpt.pt").write_text("half")
    else:
        path.symlink_to(checkpoint if "checkpoint" in kind else "nowhere")


def test_foreign_checkpoints_and_names_outlive_retention_of_a_real_daemon(root: Path, tmp_path: Path) -> None:
    """Field case 12: copied in while the daemon runs and before it starts; with keep_last=1."""
    save(other := tmp_path / "other", 70, 80)
    end_daemon(other)
    save(root, 1)
    end_daemon(root)
    run = root / "default"
    for name in ("step_10-hf", ".ipynb_checkpoints", "step_-1"):
        shutil.copytree(run / "step-000000001", run / name)
    (run / ".nfs0001").touch()
    (run / "step-000000003").symlink_to("nowhere")
    shutil.copytree(other / "default" / "step-000000070", run / "step-000000070")
    before = {path.name for path in run.iterdir() if not path.name.startswith(".tmp-")}
    before -= {"step-000000001", "newest.json"}  # the latter a cache, now and then made anew
    with detached(root, "--keep-last", "1"):
        save(root, 4)
        shutil.copytree(other / "default" / "step-000000080", run / "step-000000080")
        save(root, 5, 6)
        wait_until(lambda: steps_of(root) == ["3", "6", "70", "80"])
    assert before <= {path.name for path in run.iterdir()}
    assert ckptd.verify(run / "step-000000070").ok
    found = ckptd.latest_valid(root)
    assert found is not None
    assert found.step == 6


def test_a_step_saved_again_is_a_second_whole_checkpoint_and_the_newer_one_wins(root: Path) -> None:
    """Field case 13, with and without a daemon, the contents differing each time."""
    for number, mode in enumerate(("auto", "auto", "off"), 1):
        with ckptd.Client(root, daemon=mode) as client:  # type: ignore[arg-type]
            client.snapshot(5, state_of(number)).wait(timeout_s=60)
            found = client.latest()
        end_daemon(root)
        assert found is not None
        names = ["step-000000005", *(f"step-000000005.{again}" for again in range(2, number + 1))]
        assert found.name == names[-1]
        for at, name in enumerate(names, 1):
            assert ckptd.load(root / "default" / name)["counter"] == at


def test_the_last_two_are_the_last_two_whatever_mtimes_spelling_and_restarts_say(root: Path) -> None:
    """Field cases 15 and 18: keep_last=2; daemon and client are new for every save, mtimes shuffled."""
    luck = random.Random(3)
    done: list[int] = []
    for step in (9, 10, 99, 100, 1000, 10000):
        with detached(root, "--keep-last", "2"):
            save(root, step)
            done.append(step)
            wait_until(lambda: steps_of(root) == sorted(map(str, done[-2:])))
        for path in (root / "default").glob("step-*"):
            at = luck.randrange(2**31)
            os.utime(path, (at, at))
    assert steps_of(root) == ["1000", "10000"]


def test_the_best_stays_beside_the_last_two_through_nan_missing_tied_and_restarts(root: Path) -> None:
    """Field case 17: keep_last=2 + keep_best=1; the policy is written down, so later starts need no flags."""
    nothing: dict[str, Any] = {}
    metrics = [{"loss": 3.0}, {"loss": torch.tensor(1.0)}, {"loss": float("nan")}, nothing, {"loss": 2.0}]
    kept = ["1", "12", "23", "234", "245"]
    with detached(root, "--keep-last", "2", "--keep-best", "1", "--monitor", "loss:min"):
        pass
    for step, (given, wanted) in enumerate(zip(metrics, kept, strict=True), 1):
        with detached(root), ckptd.Client(root) as client:
            client.snapshot(step, state_of(step), metrics=given).wait("verified", timeout_s=60)
            wait_until(lambda wanted=wanted: steps_of(root) == list(wanted))  # type: ignore[misc]
    with detached(root), ckptd.Client(root) as client:
        for step, loss in ((6, 1.0), (7, 5.0), (8, 6.0)):  # 6 ties with 2 and is newer
            client.snapshot(step, state_of(step), metrics={"loss": loss}).wait("verified", timeout_s=60)
        wait_until(lambda: steps_of(root) == ["6", "7", "8"])
        assert client.best("loss", "min").step == 6  # type: ignore[union-attr]


def test_one_deleted_by_hand_under_a_running_daemon_neither_crashes_it_nor_counts(root: Path) -> None:
    """Field case 18."""
    with detached(root, "--keep-last", "3") as daemon:
        save(root, 1, 2, 3)
        shutil.rmtree(root / "default" / "step-000000002")
        save(root, 4)
        assert steps_of(root) == ["1", "3", "4"]
        save(root, 5)
        wait_until(lambda: steps_of(root) == ["3", "4", "5"])
        assert daemon.alive()


@pytest.mark.parametrize("damage", ["deleted", "emptied", "garbage"])
def test_a_start_on_a_lost_run_index_rebuilds_it_and_deletes_nothing(root: Path, damage: str) -> None:
    """Field case 19: keep_last=1 from now on, and three checkpoints that the index doesn't know any more."""
    save(root, 1, 2, 3)
    index = root / "default" / "index.json"
    wait_until(index.exists)  # it is written beside
    end_daemon(root)
    whole = index.read_bytes()
    index.unlink() if damage == "deleted" else index.write_bytes(whole[:99] if damage == "garbage" else b"")

    with detached(root, "--keep-last", "1"):
        wait_until(lambda: verified(root) == [1, 2, 3])
        assert steps_of(root) == ["1", "2", "3"]
        save(root, 4)
        wait_until(lambda: steps_of(root) == ["4"])


def verified(root: Path) -> list[int]:
    return [one.step for one in checkpoints(root) if one.verified]
