"""The latest told without a look into every folder is the one that reading the whole run gives."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ckptd
from ckptd.disk import durable, series, series_entries
from ckptd.disk import newest as by_index
from ckptd.disk.commit import commit_snapshot
from ckptd.disk.entry import Entry, read_entry
from ckptd.disk.newest import newest_on_line
from ckptd.disk.newest_file import FolderState, Newest, read_newest
from ckptd.disk.run_index import Recent, known_folders, read_recent, read_run_index
from ckptd.disk.series import Checkpoint, read_series
from ckptd.disk.verification import check
from ckptd.errors import CkptdError
from ckptd.format.records import index_to_bytes, read_index
from ckptd.names import NEWEST_FILE, step_folder, work_folder
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.name_watch import NameWatch
from ckptd_daemon.series.policy import RetentionPolicy
from fake_daemon import wait_until
from run_damage import flip, quarantine, rewound
from snapshots import Writer, data_for, descriptor


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def sum_up(writer: Writer, *, verify: bool = True) -> None:
    """As a daemon leaves the run: everything verified, its index written, and which is the newest noted."""
    watch = NameWatch()
    catalogue = Catalogue(writer.root, writer.run, watch=watch)
    catalogue.open()
    for name in catalogue.unverified() if verify else ():
        catalogue.apply_report(check(writer.run_dir / name))
    catalogue.write_index()
    if catalogue._view.newest() is not None:
        wait_until(lambda: catalogue.note_newest() or is_noted(writer))  # type: ignore[func-returns-value]
    watch.close()


def is_noted(writer: Writer) -> bool:
    return read_newest(writer.run_dir, FolderState.of(writer.run_dir)) is not None


def three(writer: Writer) -> Path:
    for step in (1, 2, 3):
        writer.commit(step)
    sum_up(writer)
    return writer.run_dir / "step-000000003"


def asked(writer: Writer, wait: bool) -> Checkpoint | str | None:
    try:
        return ckptd.latest_valid(writer.root.path, writer.run, wait=wait)
    except CkptdError as error:
        return f"{type(error).__name__}: {error}"


def nothing(writer: Writer) -> None:
    three(writer)


def another_commit(writer: Writer) -> None:
    three(writer)
    writer.commit(4)


def a_lower_step_later(writer: Writer) -> None:
    writer.commit(1000)
    writer.commit(999)
    sum_up(writer)


def a_bit_of_the_newest(writer: Writer) -> None:
    flip(three(writer) / "ckpt.pt")


def the_newest_ones_index(writer: Writer) -> None:
    flip(three(writer) / "index.json", 300)


def the_newest_without_a_file(writer: Writer) -> None:
    (three(writer) / "ckpt.pt").unlink()


def the_newest_quarantined(writer: Writer) -> None:
    quarantine(writer, three(writer).name, 3)


def one_quarantined_that_the_index_has_forgotten(writer: Writer) -> None:
    quarantine(writer, three(writer).name, 3)
    sum_up(writer)


def the_newest_in_trash(writer: Writer) -> None:
    newest = three(writer)
    newest.rename(newest.with_name(work_folder("trash", 3)))


def an_old_one_in_trash(writer: Writer) -> None:
    three(writer)
    (writer.run_dir / "step-000000001").rename(writer.run_dir / work_folder("trash", 1))


def another_line(writer: Writer) -> None:
    rewound(writer)
    sum_up(writer)


def a_new_line_whose_head_is_damaged(writer: Writer) -> None:
    flip(rewound(writer).path / "index.json", 300)
    sum_up(writer)


def a_new_line_whose_head_is_gone(writer: Writer) -> None:
    head = rewound(writer).path
    sum_up(writer)
    head.rename(head.with_name(work_folder("trash", 8)))


def a_new_line_whose_head_is_gone_and_forgotten(writer: Writer) -> None:
    a_new_line_whose_head_is_gone(writer)
    sum_up(writer)


def a_copy_of_the_newest(writer: Writer) -> None:
    newest = three(writer)
    shutil.copytree(newest, newest.with_name(newest.name + ".2"))


def a_copy_of_an_old_one_in_the_place_of_the_newest(writer: Writer) -> None:
    newest = three(writer)
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("step-000000001"), newest)


def a_folder_replaced_by_a_newer_one(writer: Writer) -> None:
    three(writer)
    old = writer.run_dir / "step-000000001"
    moved = old.with_name("elsewhere")
    old.rename(moved)
    old.mkdir()
    for path in moved.iterdir():
        shutil.copy2(path, old)
    index = dataclasses.replace(read_index(moved), sequence=9, parent=3, lineage=((1, 9),), snapshot=9)
    (old / "index.json").write_bytes(index_to_bytes(index))


def a_newer_one_in_a_folder_with_the_inode_of_the_one_before(writer: Writer) -> None:
    """As a file system gives it to the folder that is made after another was removed."""
    three(writer)
    old = writer.run_dir / "step-000000001"
    index = dataclasses.replace(read_index(old), sequence=9, parent=3, lineage=((1, 9),), snapshot=9)
    (old / "new").write_bytes(index_to_bytes(index))
    (old / "new").rename(old / "index.json")
    old.rename(old.with_name("elsewhere"))
    (old.with_name("elsewhere")).rename(old)


def a_foreign_one_that_is_newer(writer: Writer) -> None:
    newest = three(writer)
    index = dataclasses.replace(
        read_index(newest), sequence=9, step=9, run_id="f" * 32, parent=3, lineage=((1, 9),), snapshot=9
    )
    foreign = shutil.copytree(newest, newest.with_name(step_folder(9)))
    (foreign / "index.json").write_bytes(index_to_bytes(index))


def a_damaged_decision(writer: Writer) -> None:
    three(writer)
    for path in (writer.run_dir / "decisions").iterdir():
        flip(path, 20)


def a_garbled_run_index(writer: Writer) -> None:
    three(writer)
    flip(writer.run_dir / "index.json", 200)


def a_link_and_a_file_of_such_names(writer: Writer) -> None:
    newest = three(writer)
    newest.with_name("step-000000008").symlink_to(newest)
    newest.with_name("step-000000009").write_text("")
    newest.with_name("step-10-hf").mkdir()


def nothing_verified(writer: Writer) -> None:
    writer.commit(1)
    writer.commit(2)
    sum_up(writer, verify=False)


def nothing_there(writer: Writer) -> None:
    three(writer)
    for path in writer.run_dir.glob("step-*"):
        shutil.rmtree(path)


CASES: list[Callable[[Writer], None]] = [
    nothing, another_commit, a_lower_step_later, a_bit_of_the_newest, the_newest_ones_index,
    the_newest_without_a_file, the_newest_quarantined, one_quarantined_that_the_index_has_forgotten,
    the_newest_in_trash, an_old_one_in_trash, another_line,
    a_new_line_whose_head_is_damaged, a_new_line_whose_head_is_gone,
    a_new_line_whose_head_is_gone_and_forgotten, a_copy_of_the_newest,
    a_copy_of_an_old_one_in_the_place_of_the_newest, a_folder_replaced_by_a_newer_one,
    a_newer_one_in_a_folder_with_the_inode_of_the_one_before,
    a_foreign_one_that_is_newer, a_damaged_decision, a_garbled_run_index, a_link_and_a_file_of_such_names,
    nothing_verified, nothing_there,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize(
    ("wait", "noted"), [(True, False), (False, False), (True, True)], ids=["wait", "at once", "noted"]
)
def test_the_answer_is_that_of_the_whole_run(
    case: Callable[[Writer], None], wait: bool, noted: bool, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    case(writer)
    if not noted:
        (writer.run_dir / NEWEST_FILE).unlink(missing_ok=True)
    soon = asked(writer, wait)
    monkeypatch.setattr(series, "newest_on_line", lambda _: None)
    assert soon == asked(writer, wait)


def test_only_the_newest_folder_is_opened(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = three(writer)
    opened: list[str] = []

    def counted(path: Path) -> Entry | None:
        opened.append(path.name)
        return read_entry(path)

    monkeypatch.setattr(by_index, "read_entry", counted)
    monkeypatch.setattr(series, "read_series", None)
    found = ckptd.latest_valid(writer.root.path, writer.run)
    assert found is not None
    assert (found.path, found.verified, found.passed_over) == (newest, True, ())
    assert opened == [newest.name]


@pytest.mark.parametrize("number", [3, 30])
def test_nothing_is_listed_while_no_name_has_changed(
    number: int, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, number + 1):
        writer.commit(step)
    sum_up(writer)
    listed: list[str] = []
    for call in (os.scandir, os.listdir):

        def counted(path: Any, call: Any = call) -> Any:
            listed.append(os.path.basename(path))
            return call(path)

        monkeypatch.setattr(os, call.__name__, counted)
    monkeypatch.setattr(by_index, "known_folders", None)
    found = newest_on_line(writer.run_dir)
    assert found is not None and found.step == number
    assert writer.run_dir.name not in listed


def test_what_is_noted_of_a_name_is_not_believed_of_another_folder_or_sequence(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = three(writer)
    real = by_index.read_newest
    for wrong in ({"token": f"{newest.name}:1"}, {"sequence": 2}, {"name": "../default/" + newest.name}):

        def other(*args: Any, wrong: Any = wrong) -> Newest | None:
            noted = real(*args)
            return noted and msgspec.structs.replace(noted, **wrong)

        monkeypatch.setattr(by_index, "read_newest", other)
        assert newest_on_line(writer.run_dir) is None


def test_a_newest_one_that_changed_since_it_was_noted_is_verified_anew(writer: Writer) -> None:
    newest = three(writer)
    flip(newest / "ckpt.pt")
    assert is_noted(writer)
    found = newest_on_line(writer.run_dir)
    assert found is not None and not found.verified


def test_a_run_that_changes_between_the_two_listings_is_read_whole(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = three(writer)
    (writer.run_dir / NEWEST_FILE).unlink()
    assert newest_on_line(writer.run_dir) is not None

    def renames(path: Path) -> Entry | None:
        entry = read_entry(path)
        if newest.exists():
            os.rename(newest, newest.with_name(work_folder("trash", 3)))
        return entry

    monkeypatch.setattr(by_index, "read_entry", renames)
    assert newest_on_line(writer.run_dir) is None


def test_what_is_committed_while_the_noted_one_is_read_is_found_by_a_listing(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(writer)

    def commits(path: Path) -> Entry | None:
        monkeypatch.setattr(by_index, "read_entry", read_entry)
        writer.commit(4)
        return read_entry(path)

    monkeypatch.setattr(by_index, "read_entry", commits)
    found = newest_on_line(writer.run_dir)
    assert found is not None and found.name == step_folder(4)


def test_what_is_committed_between_listing_and_index_is_found_by_another_look(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(writer)
    (writer.run_dir / NEWEST_FILE).unlink()
    real = known_folders

    def committed_before(run_dir: Path) -> tuple[Recent, set[str]] | None:
        monkeypatch.setattr(by_index, "known_folders", real)
        writer.commit(4)
        sum_up(writer)
        return real(run_dir)

    monkeypatch.setattr(by_index, "known_folders", committed_before)
    found = newest_on_line(writer.run_dir)
    assert found is not None
    assert (found.name, found.verified) == (step_folder(4), True)


def test_what_is_recent_is_nothing_without_the_index_it_goes_with(writer: Writer) -> None:
    three(writer)
    index = writer.run_dir / "index.json"
    assert read_recent(writer.run_dir) is not None
    other = shutil.copy(index, writer.root.path / "copy")
    os.replace(other, index)
    assert read_recent(writer.run_dir) is None
    assert read_run_index(writer.run_dir) is not None
    (writer.run_dir / "recent.json").write_bytes(b"garbage")
    assert read_recent(writer.run_dir) is None


def test_what_is_recent_is_gone_where_it_cannot_be_written_anew(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(writer)
    catalogue = Catalogue(writer.root, writer.run)
    catalogue.open()
    catalogue.write_index()

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(durable, "replace_file", full)
    with pytest.raises(OSError, match="full"):
        catalogue.write_index()
    assert read_recent(writer.run_dir) is None
    assert read_run_index(writer.run_dir) is not None


def test_a_name_that_may_be_given_again_is_not_known_any_more(writer: Writer) -> None:
    three(writer)
    catalogue = Catalogue(writer.root, writer.run)
    catalogue.open()
    catalogue.position_for(descriptor(4), 4)
    assert read_recent(writer.run_dir) is not None
    catalogue.position_for(descriptor(2), 4)
    assert read_recent(writer.run_dir) is None


def test_a_start_forgets_what_is_recent_when_other_folders_are_there(writer: Writer) -> None:
    newest = three(writer)
    Catalogue(writer.root, writer.run).open()
    assert read_recent(writer.run_dir) is not None
    newest.rename(newest.with_name(work_folder("trash", 3)))
    Catalogue(writer.root, writer.run).open()
    assert read_recent(writer.run_dir) is None


def test_who_writes_without_a_daemon_leaves_nothing_recent(writer: Writer) -> None:
    three(writer)
    with ckptd.Client(root=writer.root.path, run=writer.run, daemon="off"):
        assert read_recent(writer.run_dir) is None


def test_what_index_and_recent_say_together_is_what_is_known(writer: Writer) -> None:
    catalogue = Catalogue(writer.root, writer.run)
    writer.commit(1)
    catalogue.open()
    written = set()
    for step in range(2, 12):
        position = catalogue.position_for(descriptor(step), step)
        catalogue.added(commit_snapshot(writer.run_dir, descriptor(step), data_for(step), position))
        if step % 3:
            catalogue.apply_report(check(writer.run_dir / step_folder(step)))
        if step == 8:
            flip(writer.run_dir / step_folder(7) / "ckpt.pt")
            catalogue.apply_report(check(writer.run_dir / step_folder(7)))
        catalogue.write_index()
        written.add((writer.run_dir / "index.json").stat().st_ino)
        known, said = catalogue._view.run_index(), read_run_index(writer.run_dir)
        assert said is not None
        assert set(said.marks) == set(known.marks)
        assert {row.name for row in said.checkpoints} >= {row.name for row in known.checkpoints}
        assert said.highest_sequence == known.highest_sequence
    assert len(written) < 5


def test_a_mark_that_was_taken_back_is_in_neither(writer: Writer) -> None:
    newest = three(writer)
    catalogue = Catalogue(writer.root, writer.run)
    catalogue.open()
    catalogue.write_index()  # with all marks, as the first of each process
    position = catalogue.position_for(descriptor(4), 4)
    catalogue.added(commit_snapshot(writer.run_dir, descriptor(4), data_for(4), position))
    flip(newest / "ckpt.pt")
    catalogue.apply_retention(RetentionPolicy(keep_last=9))
    catalogue.write_index()
    said = read_run_index(writer.run_dir)
    assert said is not None
    assert {mark.name for mark in said.marks} == {step_folder(1), step_folder(2)}


def test_many_that_the_index_does_not_know_are_read_as_a_whole_run_is(writer: Writer) -> None:
    writer.commit(1)
    sum_up(writer)
    for step in range(2, 2 + by_index._MOST_UNKNOWN):
        writer.commit(step)
    assert newest_on_line(writer.run_dir) is not None
    writer.commit(100)
    assert newest_on_line(writer.run_dir) is None


def test_what_was_read_is_not_opened_again_while_it_is_still_that_folder(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = three(writer)
    seen = read_series(writer.root, writer.run).entries
    shutil.rmtree(newest)
    shutil.copytree(newest.with_name("step-000000002"), newest)  # of another step: no checkpoint any more
    (writer.run_dir / "step-000000001" / "ckpt.pt").unlink()
    opened: list[str] = []

    def counted(path: Path) -> Entry | None:
        opened.append(path.name)
        return read_entry(path)

    monkeypatch.setattr(series_entries, "read_entry", counted)
    now = read_series(writer.root, writer.run, seen=seen)
    assert sorted(opened) == ["step-000000001", newest.name]
    assert [entry.status for entry in now.entries] == ["incomplete", "committed", "corrupt"]


def test_without_a_daemon_each_checkpoint_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(path: Path) -> Entry | None:
        opened.append(path.name)
        return read_entry(path)

    with ckptd.Client(root=tmp_path / "root", daemon="off") as client:
        monkeypatch.setattr(series_entries, "read_entry", counted)
        for step in range(1, 5):
            client.snapshot(step, {"count": step})
    assert sorted(opened) == [f"step-00000000{step}" for step in (1, 2, 3)]
