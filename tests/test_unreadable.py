"""A checkpoint that can't be read now isn't corrupt: nothing is decided, forked or removed by that."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from ckptd.disk.commit import Committed
from ckptd.disk.decisions import read_decisions
from ckptd.disk.series import checkpoints, latest_valid, read_series, runs
from ckptd.disk.verification import check
from ckptd.errors import NoValidCheckpoint, OutcomeUnknown, ReadFailed, SaveFailed
from ckptd.names import DECISIONS_DIR, INDEX_FILE
from ckptd.snapshot.slot_header import SlotHeader, SlotState
from ckptd.snapshot.slots import Slot
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import Settings
from made_series import Made, descriptor, flip_byte
from snapshots import Writer
from unreadable_disk import descriptors_left, unreadable

MEDIUM = [errno.EIO, errno.ESTALE, errno.EBADMSG]
MACHINE = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]
LAST_1 = RetentionPolicy(keep_last=1)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "root")
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    made.catalogue.write_index()
    return made


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    writer = Writer(tmp_path / "root")
    for step in (1, 2, 3):
        writer.commit(step)
    return writer


# --- what an entry is called ----------------------------------------------------------------------


@pytest.mark.parametrize("number", MEDIUM)
def test_an_index_that_cannot_be_read_now_makes_no_checkpoint_corrupt(made: Made, number: int) -> None:
    with unreadable(number, made.dir / "step-000000003"):
        newest = read_series(made.root, "r").entries[-1]
    assert (newest.name, newest.status, newest.hint) == ("step-000000003", "unreadable", 3)
    assert newest.reason == f"can't be read now: {os.strerror(number)}"
    assert read_series(made.root, "r").entries[-1].status == "committed"


@pytest.mark.parametrize("number", MACHINE)
def test_a_run_is_not_described_at_all_while_the_machine_lacks_what_it_takes(made: Made, number: int) -> None:
    with unreadable(number, made.dir / "step-000000003"), pytest.raises(ReadFailed) as told:
        read_series(made.root, "r")
    assert told.value.errno == number


def test_the_newest_one_that_cannot_be_read_now_is_passed_over_and_said(made: Made) -> None:
    with unreadable(errno.EIO, made.dir / "step-000000003"):
        found = latest_valid(made.root, "r")
    assert found is not None
    assert (found.step, [one.reason for one in found.passed_over]) == (
        2, ["can't be read now: Input/output error"],
    )  # fmt: skip


def test_that_all_are_invalid_is_not_said_of_those_that_cannot_be_read_now(made: Made) -> None:
    with unreadable(errno.EIO, made.dir):
        with pytest.raises(ReadFailed, match="no checkpoint can be read now"):
            latest_valid(made.root, "r")
        with pytest.raises(ReadFailed):
            checkpoints(made.root, "r")
    for name in made.names:
        flip_byte(made.dir / name / INDEX_FILE)
    with pytest.raises(NoValidCheckpoint):
        latest_valid(made.root, "r")


@pytest.mark.parametrize("left", range(4))
def test_short_of_descriptors_a_query_says_so_or_answers_right(made: Made, left: int) -> None:
    (made.dir / INDEX_FILE).unlink()  # its marks, so that every file has to be read
    for ask in (lambda: latest_valid(made.root, "r"), lambda: checkpoints(made.root, "r")[-1]):
        with descriptors_left(left):
            try:
                found = ask()
            except ReadFailed as error:
                said = str(error)
            else:
                assert found is not None
                assert (found.step, found.passed_over) == (3, ())
                continue
        assert "Too many open files" in said
        assert "ulimit -n" in said


def test_short_of_descriptors_no_run_is_left_out_of_the_list(made: Made) -> None:
    with descriptors_left(1):
        try:
            runs(made.root)
        except ReadFailed as error:
            said = str(error)
    assert "Too many open files" in said


@pytest.mark.parametrize("number", [*MEDIUM, *MACHINE])
def test_a_check_that_cannot_read_a_file_tells_nothing(made: Made, number: int) -> None:
    folder = made.dir / "step-000000003"
    with unreadable(number, folder, name="ckpt.pt"), pytest.raises(ReadFailed) as told:
        check(folder)
    assert told.value.errno == number


def test_a_fault_found_beside_an_error_is_reported_all_the_same(made: Made) -> None:
    folder = made.dir / "step-000000003"
    flip_byte(folder / "tensors.json")
    with unreadable(errno.EIO, folder, name="ckpt.pt"):
        report = check(folder)
    assert not report.ok
    assert [fault.split(":")[0] for fault in report.faults] == ["tensors.json"]


# --- the daemon's view ----------------------------------------------------------------------------


def forks(made: Made) -> int:
    return len(read_decisions(made.dir).forks)


def test_a_hiccup_while_the_run_is_read_again_forks_nothing_and_forgets_nothing(made: Made) -> None:
    with unreadable(errno.EIO, made.dir):
        made.catalogue._view.rescan(always=True)
        assert made.catalogue.apply_retention(LAST_1) == []
        during = made.commit(4)
    assert (during.index.parent, during.index.lineage, forks(made)) == (3, ((1, 4),), 0)
    made.catalogue.rescan()
    assert [(e.status, e.verified, e.on_line) for e in made.catalogue._view.series.entries] == [
        ("committed", True, True)
    ] * 3 + [("committed", False, True)]


def test_a_snapshot_committed_before_is_still_found_while_it_cannot_be_read(made: Made) -> None:
    client = read_series(made.root, "r").own[-1].client_id
    with unreadable(errno.EIO, made.dir):
        made.catalogue._view.rescan(always=True)
        assert made.catalogue.find(client, 3).name == "step-000000003"


def test_a_start_that_can_read_nothing_opens_nothing(made: Made) -> None:
    with unreadable(errno.EIO, made.dir), pytest.raises(ReadFailed, match="what was its last"):
        made.reopen()  # the sequences it would give were given before


def test_a_start_during_a_hiccup_saves_nothing_rather_than_to_guess_and_goes_on_after_it(made: Made) -> None:
    with unreadable(errno.EIO, made.dir / "step-000000003"):
        problems = made.reopen()
        assert "step-000000003 is unreadable: can't be read now: Input/output error" in problems
        with pytest.raises(SaveFailed, match="can't be told"):
            made.commit(4)
    after = made.commit(4, verify=True)
    assert (after.index.parent, forks(made)) == (3, 0)
    assert made.catalogue.apply_retention(RetentionPolicy(keep_last=9)) == []
    assert len(made.names) == 4


def test_an_older_one_that_cannot_be_read_keeps_nobody_from_saving_but_everything_from_going(
    made: Made,
) -> None:
    with unreadable(errno.EIO, made.dir / "step-000000001"):
        made.reopen()
        done = made.commit(4, verify=True)
        assert (done.index.parent, forks(made)) == (3, 0)
        assert made.catalogue.apply_retention(LAST_1) == []
    assert {one.name for one in made.catalogue.apply_retention(LAST_1)} == {
        f"step-00000000{step}" for step in (1, 2, 3)
    }


def test_the_first_one_after_a_restore_of_an_older_one_forks_though_the_head_cannot_be_read(
    made: Made,
) -> None:
    with unreadable(errno.EIO, made.dir / "step-000000003"):
        made.reopen()
        done = made.commit(3, base=2, base_snapshot=made.snapshots, client_id="d" * 32)
    assert (done.index.parent, forks(made)) == (2, 1)


def test_without_the_runs_index_a_head_that_cannot_be_read_is_not_passed_by(writer: Writer) -> None:
    with unreadable(errno.EIO, writer.run_dir / "step-000000003"), pytest.raises(SaveFailed):
        writer.commit(4)
    assert writer.commit(4).index.parent == 3


def test_a_run_whose_birth_cannot_be_read_now_gets_no_second_one(made: Made) -> None:
    (birth,) = (made.dir / DECISIONS_DIR).iterdir()
    with unreadable(errno.EIO, made.dir / DECISIONS_DIR, name=birth.name), pytest.raises(ReadFailed):
        made.reopen()
    assert list((made.dir / DECISIONS_DIR).iterdir()) == [birth]


def test_a_fork_that_cannot_be_read_now_still_holds(made: Made) -> None:
    made.commit(2, base=1, client_id="d" * 32, verify=True)
    before = made.catalogue._view.series.decisions.forks
    (fork,) = (made.dir / DECISIONS_DIR).glob("*-fork-*")
    with unreadable(errno.EIO, made.dir / DECISIONS_DIR, name=fork.name):
        made.catalogue._view.rescan(always=True)
        assert made.catalogue._view.series.decisions.forks == before != ()
        assert made.catalogue.apply_retention(LAST_1) == []


def test_a_report_of_what_the_daemon_cannot_read_now_is_not_applied(made: Made) -> None:
    made.commit(4)
    made.catalogue.write_index()
    report = check(made.dir / "step-000000004")
    with unreadable(errno.EIO, made.dir / "step-000000004"):
        made.reopen()
        with pytest.raises(ReadFailed):
            made.catalogue.apply_report(report)
    assert made.catalogue.apply_report(report) == "verified"


# --- a copied index -------------------------------------------------------------------------------


def test_an_index_of_another_step_is_corrupt_in_its_folders_place_and_passed_over(made: Made) -> None:
    shutil.copyfile(made.dir / "step-000000001" / INDEX_FILE, made.dir / "step-000000003" / INDEX_FILE)
    for known in (True, False):
        if not known:
            (made.dir / INDEX_FILE).unlink()
        found = latest_valid(made.root, "r")
        assert found is not None
        assert found.step == 2
        assert [one.name for one in found.passed_over] == ["step-000000003"]
        assert "step 1" in found.passed_over[0].reason


def test_an_index_copied_to_another_save_of_its_step_is_corrupt_there_and_not_where_it_belongs(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path / "root")
    first, second = made.commit(5), made.commit(5)
    made.catalogue.write_index()
    shutil.copyfile(made.dir / first.name / INDEX_FILE, made.dir / second.name / INDEX_FILE)
    seen = {entry.name: (entry.status, entry.own) for entry in read_series(made.root, "r").entries}
    assert seen == {first.name: ("committed", True), second.name: ("corrupt", False)}
    found = latest_valid(made.root, "r")
    assert found is not None
    assert (found.name, [one.name for one in found.passed_over]) == (first.name, [second.name])


def test_a_copied_index_is_reported_corrupt_and_its_folder_left_in_place(made: Made) -> None:
    shutil.copyfile(made.dir / "step-000000001" / INDEX_FILE, made.dir / "step-000000003" / INDEX_FILE)
    made.reopen()
    assert made.verify("step-000000003") == "corrupt"
    assert "step-000000003" in made.names


# --- an outcome that isn't known ------------------------------------------------------------------


def test_an_unknown_outcome_stays_unknown_though_the_run_cannot_be_read_either(made: Made) -> None:
    def commit(*_: object, **_how: object) -> Committed:
        raise OutcomeUnknown("the folder's sync failed")

    class Unreadable(Catalogue):
        def rescan(self) -> list[str]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    catalogue = Unreadable(made.root, "r")
    catalogue.open()
    disk = Disk(made.root, Settings(), commit=commit)
    snap = descriptor(4, 4)
    header = SlotHeader(state=SlotState.SEALED, client_id=snap.client_id, run="r", snapshot=4, data_bytes=64)
    slot = Slot.anonymous("slot", 64)
    with pytest.raises(OutcomeUnknown):
        disk._write(catalogue, header, snap, slot, 4)
