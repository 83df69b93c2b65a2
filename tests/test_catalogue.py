from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import durable
from ckptd.disk.series import latest_valid, read_series
from ckptd.disk.verification import check
from ckptd.errors import SaveFailed
from ckptd.names import DECISIONS_DIR, INDEX_FILE, QUARANTINE_DIR
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.quarantine import quarantine
from made_series import CLIENT, Made, descriptor, flip_byte

LAST_1 = RetentionPolicy(keep_last=1)
LAST_2 = RetentionPolicy(keep_last=2)
OTHER_CLIENT = "d" * 32


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "root")


def steps(made: Made) -> list[str]:
    """What is in the run, without padding: "300", "400.2"."""
    return [name.removeprefix("step-").lstrip("0") for name in made.names]


def latest(made: Made) -> str:
    found = latest_valid(made.root, made.run)
    assert found is not None
    return found.name.removeprefix("step-").lstrip("0")


def prune(made: Made, policy: RetentionPolicy) -> list[str]:
    return [
        removed.name.removeprefix("step-").lstrip("0") for removed in made.catalogue.apply_retention(policy)
    ]


# --- birth, order, position -----------------------------------------------------------------------


def test_a_new_run_is_born_once_and_keeps_its_id(made: Made) -> None:
    run_id = made.catalogue.run_id
    made.commit(1)
    made.reopen()
    assert made.catalogue.run_id == run_id
    assert read_series(made.root, "r").decisions.birth_run_id == run_id
    assert len(list((made.dir / DECISIONS_DIR).iterdir())) == 1


def test_a_run_without_its_birth_takes_the_id_of_its_highest_sequence(made: Made) -> None:
    run_id = made.catalogue.run_id
    made.commit(1)
    shutil.rmtree(made.dir / DECISIONS_DIR)
    made.reopen()
    assert made.catalogue.run_id == run_id
    assert read_series(made.root, "r").decisions.birth_run_id == run_id


@pytest.mark.parametrize("how", ["moved", "removed", "another"])
def test_a_run_whose_folder_was_moved_or_removed_goes_on_in_a_new_one_and_says_so(
    made: Made, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = made.catalogue.run_id
    made.commit(1)
    if how == "removed":
        shutil.rmtree(made.dir)
    else:
        made.dir.rename(made.dir.with_name("elsewhere"))
    if how == "another":
        made.dir.mkdir()
    made.commit(2)
    made.commit(3)
    assert "run.folder_lost run=r" in caplog.text and caplog.text.count("folder_lost") == 1
    assert steps(made) == ["2", "3"] and latest(made) == "3"
    assert read_series(made.root, "r").decisions.birth_run_id == run_id == made.catalogue.run_id
    made.reopen()
    assert made.commit(4).index.sequence == 4


def test_nothing_is_saved_into_another_runs_folder_put_in_its_place(made: Made, tmp_path: Path) -> None:
    other = Made(tmp_path / "other")
    other.commit(7)
    made.commit(1)
    made.dir.rename(made.dir.with_name("elsewhere"))
    other.dir.rename(made.dir)
    for _ in range(2):
        with pytest.raises(SaveFailed, match="another run's folder"):
            made.commit(2)
    assert steps(made) == ["7"]


def test_an_unreadable_birth_is_not_replaced_by_another(made: Made) -> None:
    made.commit(1)
    (birth,) = (made.dir / DECISIONS_DIR).iterdir()
    birth.write_text("{}")
    assert any(birth.name in problem for problem in made.reopen())
    assert [p.name for p in (made.dir / DECISIONS_DIR).iterdir()] == [birth.name]


def test_snapshots_go_on_from_each_other_and_a_restored_client_from_what_it_restored(made: Made) -> None:
    made.commit(100)
    second = made.commit(200)
    assert (second.index.parent, second.index.lineage) == (1, ((1, 2),))
    rewound = made.commit(150, base=1, client_id=OTHER_CLIENT)
    assert (rewound.index.parent, rewound.index.lineage) == (1, ((1, 1), (3, 3)))
    after = made.commit(160, base=1, client_id=OTHER_CLIENT)
    assert after.index.parent == rewound.index.sequence
    assert latest(made) == "160"


def test_a_snapshot_is_found_by_client_and_number_until_it_is_damaged(made: Made) -> None:
    name = made.commit(1).name
    assert made.catalogue.find(CLIENT, 1).name == name
    assert made.catalogue.find(CLIENT, 2) is None
    made.reopen()
    assert made.catalogue.find(CLIENT, 1).name == name
    (made.dir / name / "ckpt.pt").unlink()
    made.reopen()
    assert (
        made.catalogue.find(CLIENT, 1) is None
    )  # so its snapshot, were it still in a slot, is written again


# --- proof ----------------------------------------------------------------------------------------


def test_marks_survive_a_restart_and_a_changed_file_voids_them(made: Made) -> None:
    first, second = made.commit(1, verify=True), made.commit(2, verify=True)
    made.catalogue.write_index()
    made.reopen()
    assert made.catalogue.unverified() == []
    flip_byte(first.path / "ckpt.pt", keep_times=True)
    made.reopen()
    assert made.catalogue.unverified() == [first.name]
    assert latest(made) == second.name.removeprefix("step-").lstrip("0")


def test_unverified_ones_are_named_newest_first(made: Made) -> None:
    names = [made.commit(step).name for step in (300, 100, 200)]
    assert made.catalogue.unverified() == names[::-1]


def test_a_corrupt_one_is_moved_to_quarantine_and_said_with_hashes_and_the_next_valid_step(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    made.commit(1100, verify=True)
    bad = made.commit(1200, shards=1)
    shard = bad.index.shards[0]
    flip_byte(bad.path / shard.path)
    with caplog.at_level(logging.ERROR):
        assert made.verify(bad.name) == "corrupt"
    (said,) = [record.getMessage() for record in caplog.records]
    assert bad.name in said
    assert shard.path in said
    assert shard.sha256 in said  # wanted, and the one seen besides
    assert said.count(shard.sha256[:8]) == 1
    assert "step 1100 (step-000001100) is the newest valid one before it" in said
    assert steps(made) == ["1100"]
    assert [p.name.startswith(f"{bad.name}-2-") for p in (made.dir / QUARANTINE_DIR).iterdir()] == [True]


def test_a_corrupt_head_of_a_new_line_does_not_bring_the_abandoned_line_back(made: Made) -> None:
    for step in (100, 200, 300, 400):
        made.commit(step, verify=True)
    bad = made.commit(250, base=2, client_id=OTHER_CLIENT)
    flip_byte(bad.path / "ckpt.pt")
    assert made.verify(bad.name) == "corrupt"
    assert latest(made) == "200"
    from_the_head = descriptor(260, 1, client_id="e" * 32)
    assert made.catalogue.position_for(from_the_head, 6).parent == 2
    made.reopen()
    assert latest(made) == "200"
    assert made.commit(260, base=2, client_id=OTHER_CLIENT).index.parent == 2


def test_the_last_own_one_stays_in_place_though_corrupt_lest_the_run_looks_fresh(
    made: Made,
) -> None:
    first, second = made.commit(1), made.commit(2)
    for one in (second, first):
        flip_byte(one.path / "ckpt.pt")
        assert made.verify(one.name) == "corrupt"
    assert steps(made) == ["1"]
    with pytest.raises(Exception, match="every checkpoint fails"):
        latest_valid(made.root, "r")
    made.commit(3, verify=True)
    made.catalogue.apply_retention(LAST_1)
    assert steps(made) == ["3"]
    assert len(list((made.dir / QUARANTINE_DIR).iterdir())) == 2


def test_a_corrupt_one_that_cannot_be_moved_stays_is_said_and_is_moved_later(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.commit(1, verify=True)
    bad = made.commit(2)
    flip_byte(bad.path / "ckpt.pt")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "rename_new", _refuse(errno.EROFS))
        assert made.verify(bad.name) == "corrupt"
    assert steps(made) == ["1", "2"]
    assert any(bad.name in problem for problem in made.catalogue.summary()["problems"])
    assert bad.name not in made.catalogue.unverified()
    made.catalogue.apply_retention(LAST_1)
    assert steps(made) == ["1"]


def test_one_whose_index_cannot_be_read_is_not_provably_ours_and_stays(made: Made) -> None:
    made.commit(1, verify=True)
    bad = made.commit(2)
    flip_byte(bad.path / INDEX_FILE)
    assert made.verify(bad.name) == "corrupt"
    assert steps(made) == ["1", "2"]
    assert latest(made) == "1"
    made.commit(3, verify=True)
    assert prune(made, LAST_1) == ["1"]
    assert steps(made) == ["2", "3"]


def test_a_report_on_what_has_gone_or_been_replaced_judges_nothing(made: Made, tmp_path: Path) -> None:
    made.commit(1, verify=True)
    name = made.commit(2).name
    good = check(made.dir / name)
    flip_byte(made.dir / name / "ckpt.pt")
    bad = check(made.dir / name)
    shutil.rmtree(made.dir / name)
    assert made.catalogue.apply_report(bad) == "gone"
    assert made.catalogue.apply_report(check(made.dir / name)) == "gone"
    other = Made(tmp_path / "other")
    shutil.copytree(other.commit(2).path, made.dir / name)
    assert made.catalogue.apply_report(good) == "gone"
    assert made.catalogue.apply_report(bad) == "gone"
    assert steps(made) == ["1", "2"]


def test_one_that_arrived_without_the_daemon_is_adopted_when_reported(made: Made, tmp_path: Path) -> None:
    made.commit(1, verify=True)
    made.commit(2, verify=True)
    kept = tmp_path / "kept"
    shutil.copytree(made.dir / "step-000000002", kept)
    shutil.rmtree(made.dir / "step-000000002")
    made.catalogue.rescan()
    shutil.copytree(kept, made.dir / "step-000000002")
    assert made.verify("step-000000002") == "verified"
    assert latest(made) == "2"


def test_one_that_was_repaired_since_it_failed_is_not_moved(made: Made) -> None:
    made.commit(1, verify=True)
    damaged = made.commit(2)
    flip_byte(damaged.path / "ckpt.pt")
    bad = check(damaged.path)
    flip_byte(damaged.path / "ckpt.pt")
    assert made.catalogue.apply_report(bad) == "corrupt"
    made.catalogue.apply_retention(LAST_1)
    assert steps(made) == ["1", "2"]
    assert made.verify(damaged.name) == "verified"
    assert latest(made) == "2"


def test_one_that_was_incomplete_and_is_whole_now_counts_again(made: Made) -> None:
    name = made.commit(1).name
    shutil.move(made.dir / name / "ckpt.pt", made.dir / ".away")
    assert made.reopen()
    shutil.move(made.dir / ".away", made.dir / name / "ckpt.pt")
    assert made.verify(name) == "verified"
    assert made.catalogue.summary()["problems"] == []
    assert made.catalogue.find(CLIENT, 1).name == name


def test_quarantine_takes_only_what_says_it_is_this_runs_own(made: Made) -> None:
    path = made.commit(1).path
    assert quarantine(path, "0" * 32) is None
    (path / INDEX_FILE).rename(made.dir / ".away")
    assert quarantine(path, made.catalogue.run_id) is None
    assert steps(made) == ["1"]
    with pytest.raises(FileNotFoundError):
        quarantine(made.dir / "step-000000009", made.catalogue.run_id)


# --- foreign things (case 12) ---------------------------------------------------------------------


def test_a_checkpoint_copied_in_from_elsewhere_is_reported_and_never_deleted_or_moved(
    made: Made, tmp_path: Path
) -> None:
    other = Made(tmp_path / "other")
    for step in (7, 8):
        shutil.copytree(other.commit(step).path, made.dir / f"step-{step:09d}")
    problems = made.reopen()  # the run's own id is known from its birth
    assert [p for p in problems if "another run" in p] == problems != []
    flip_byte(made.dir / "step-000000008" / "ckpt.pt")
    made.commit(1, verify=True)
    assert made.verify("step-000000007") == "verified"
    assert made.verify("step-000000008") == "corrupt"
    made.commit(2, verify=True)
    assert prune(made, LAST_1) == ["1"]
    assert steps(made) == ["2", "7", "8"]
    assert latest(made) == "2"


def test_names_of_others_are_ignored_and_left_alone(made: Made) -> None:
    made.commit(1, verify=True)
    for name in ("step_10-hf", ".ipynb_checkpoints", "step_-1", "step-1"):
        (made.dir / name).mkdir()
    (made.dir / ".nfs0001").touch()
    (made.dir / "step-000000005").symlink_to("nowhere")
    before = sorted(p.name for p in made.dir.iterdir())
    made.catalogue.write_index()
    assert made.reopen() == []
    made.commit(2, verify=True)
    prune(made, LAST_1)
    after = sorted(p.name for p in made.dir.iterdir())
    assert set(before) - set(after) == {"step-000000001"}


# --- retention on disk ----------------------------------------------------------------------------


def test_numeric_order_and_mtimes_decide_nothing_through_a_restart(made: Made) -> None:
    for step in (9, 10, 99, 100, 1000):
        made.commit(step, verify=True)
    made.catalogue.write_index()
    times = list(range(len(made.names)))
    random.Random(7).shuffle(times)
    for name, at in zip(made.names, times, strict=True):
        os.utime(made.dir / name, (at, at))
    made.reopen()
    made.commit(10000, verify=True)
    prune(made, LAST_2)
    assert steps(made) == ["1000", "10000"]


def test_after_a_rewind_the_new_lower_step_stays_and_the_abandoned_ones_go(
    made: Made,
) -> None:
    for step in (100, 200, 300, 400, 500, 600, 700):
        made.commit(step, verify=True)
    new = made.commit(400, base=3, client_id=OTHER_CLIENT)
    assert new.name == "step-000000400.2"
    assert prune(made, RetentionPolicy(keep_last=2)) == [
        "100"
    ]  # 200 and 300 are the last two verified of the line
    assert made.verify(new.name) == "verified"
    assert set(prune(made, LAST_1)) == {"200", "300", "400", "500", "600", "700"}
    assert steps(made) == ["400.2"]
    assert latest(made) == "400.2"


def test_a_restore_alone_removes_and_abandons_nothing(made: Made) -> None:
    for step in (100, 200, 300):
        made.commit(step, verify=True)
    made.catalogue.write_index()
    made.reopen()
    assert prune(made, LAST_1) == []
    assert latest(made) == "300"


def test_with_keep_last_1_the_good_one_stays_while_its_successors_stall(made: Made) -> None:
    made.commit(1, verify=True)
    made.commit(2)
    made.commit(3)
    assert prune(made, LAST_1) == []
    assert made.verify("step-000000002") == "verified"
    assert prune(made, LAST_1) == ["1"]
    assert steps(made) == ["2", "3"]


@pytest.mark.parametrize("damage", ["deleted", "emptied", "garbage", "of another run", "a folder"])
def test_a_lost_run_index_is_rebuilt_and_deletes_nothing(made: Made, tmp_path: Path, damage: str) -> None:
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    made.catalogue.write_index()
    path = made.dir / INDEX_FILE
    if damage in ("deleted", "a folder"):
        path.unlink()
    if damage == "a folder":
        path.mkdir()
    if damage == "emptied":
        path.write_bytes(b"")
    if damage == "garbage":
        path.write_bytes(os.urandom(500))
    if damage == "of another run":
        other = Made(tmp_path / "other")
        other.commit(1, verify=True)
        other.catalogue.write_index()
        shutil.copy(other.dir / INDEX_FILE, path)
    made.reopen()
    assert prune(made, LAST_1) == []
    for name in made.catalogue.unverified():
        assert made.verify(name) == "verified"
        assert prune(made, LAST_1) == []
    assert steps(made) == ["1", "2", "3"]
    if damage != "a folder":
        made.catalogue.write_index()
        made.reopen()
        assert made.catalogue.unverified() == []


def test_the_count_is_exact_through_restarts_between_saves(made: Made) -> None:
    for step in range(1, 8):
        made.commit(step, verify=True)
        prune(made, RetentionPolicy(keep_last=3))
        made.catalogue.write_index()
        if step % 2:
            made.reopen()
    assert steps(made) == ["5", "6", "7"]


def test_one_deleted_by_hand_does_not_count_and_does_not_crash(made: Made) -> None:
    for step in (1, 2, 3, 4):
        made.commit(step, verify=True)
    shutil.rmtree(made.dir / "step-000000003")
    assert prune(made, LAST_2) == ["1"]
    assert steps(made) == ["2", "4"]


def test_the_newest_verified_one_deleted_by_hand_leaves_the_one_before_it_safe(made: Made) -> None:
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    shutil.rmtree(made.dir / "step-000000003")
    assert prune(made, LAST_1) == ["1"]
    assert steps(made) == ["2"]


def test_a_newest_one_that_changed_since_it_was_verified_makes_no_other_dispensable(made: Made) -> None:
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    flip_byte(made.dir / "step-000000003" / "ckpt.pt", keep_times=True)
    assert prune(made, LAST_1) == ["1"]  # because of 2, which is as it was
    assert steps(made) == ["2", "3"]
    assert made.catalogue.unverified() == ["step-000000003"]


def test_a_best_one_that_changed_since_it_was_verified_makes_no_other_dispensable(made: Made) -> None:
    policy = RetentionPolicy(keep_last=1, keep_best=1, monitor="m", mode="max")
    for step, value in ((1, 5.0), (2, 9.0), (3, 1.0)):
        made.commit(step, metrics={"m": value}, verify=True)
    flip_byte(made.dir / "step-000000002" / "ckpt.pt")
    assert prune(made, policy) == []
    assert steps(made) == ["1", "2", "3"]


def test_a_folder_put_in_the_place_of_a_doomed_one_is_left_alone(made: Made, tmp_path: Path) -> None:
    for step in (1, 2):
        made.commit(step, verify=True)
    shutil.rmtree(made.dir / "step-000000001")
    other = Made(tmp_path / "other")
    shutil.copytree(other.commit(1).path, made.dir / "step-000000001")
    assert prune(made, LAST_1) == []
    assert steps(made) == ["1", "2"]


def test_nothing_is_removed_while_a_decision_cannot_be_read(made: Made) -> None:
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    odd = made.dir / DECISIONS_DIR / "000000000001-pin-00000000.json"
    odd.write_text("{}")  # of a later version, say
    assert prune(made, LAST_1) == []
    assert any("nothing is removed" in problem for problem in made.catalogue.summary()["problems"])
    odd.unlink()
    assert prune(made, LAST_1) == ["1", "2"]


def test_the_best_stays_and_ties_go_to_the_newer(made: Made) -> None:
    policy = RetentionPolicy(keep_last=2, keep_best=1, monitor="loss", mode="min")
    for step, loss in enumerate([3.0, 1.0, float("nan"), 1.0, 2.0, 5.0, 6.0], 1):
        made.commit(step, metrics={"loss": loss}, verify=True)
        prune(made, policy)
    assert steps(made) == ["4", "6", "7"]


def test_a_deletion_that_fails_is_warned_of_once_and_tried_again(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        made.commit(step, verify=True)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "rename_new", _refuse(errno.EPERM))
        assert prune(made, LAST_1) == []
        assert prune(made, LAST_1) == []
    assert len([r for r in caplog.records if "delete_failed" in r.getMessage()]) == 1
    assert steps(made) == ["1", "2"]
    assert prune(made, LAST_1) == ["1"]


def test_a_half_deleted_folder_is_never_offered_and_is_deleted_in_the_end(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        made.commit(step, verify=True)

    def half(path: Path) -> None:
        (path / "ckpt.pt").unlink()
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "remove_tree", half)
        assert prune(made, LAST_1) == ["1"]
    assert "delete_failed" in caplog.text
    assert [p.name.startswith(".trash-1-") for p in made.dir.iterdir() if "trash" in p.name] == [True]
    assert [entry.name for entry in read_series(made.root, "r").entries] == ["step-000000002"]
    assert prune(made, LAST_1) == []
    assert not [p for p in made.dir.iterdir() if "trash" in p.name]


def test_nothing_is_unlinked_before_its_rename_is_durable(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        made.commit(step, verify=True)
    with monkeypatch.context() as patch:
        patch.setattr(durable, "fsync_dir", _refuse(errno.EIO))
        assert prune(made, LAST_1) == ["1"]
    (trash,) = [p for p in made.dir.iterdir() if "trash" in p.name]
    assert (trash / "ckpt.pt").exists()
    prune(made, LAST_1)
    assert not trash.exists()


def test_the_summary_counts_and_names_the_newest(made: Made) -> None:
    made.commit(1, verify=True)
    made.commit(2)
    summary = made.catalogue.summary()
    assert (summary["checkpoints"], summary["verified"], summary["problems"]) == (2, 1, [])
    assert summary["last_committed"] == {"name": "step-000000002", "step": 2, "sequence": 2}
    assert summary["last_verified"] == {"name": "step-000000001", "step": 1, "sequence": 1}


def test_the_start_up_scan_reports_every_damaged_checkpoint(made: Made) -> None:
    for step in (1, 2, 3, 4):
        made.commit(step)
    (made.dir / "step-000000001" / "ckpt.pt").unlink()
    (made.dir / "step-000000002" / INDEX_FILE).unlink()
    flip_byte(made.dir / "step-000000003" / INDEX_FILE)
    problems = made.reopen()
    assert [problem.split()[0] for problem in problems] == [f"step-{step:09d}" for step in (1, 2, 3)]


def _refuse(number: int) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse
