"""What a commit costs the daemon doesn't grow with the checkpoints that are there: counted in calls and listings."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.commit import commit_snapshot
from ckptd.disk.entry import folder_identity
from ckptd.disk.verification import check
from ckptd.format.records import index_to_bytes, read_index
from ckptd_daemon.series import index_file
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.name_watch import NameWatch
from ckptd_daemon.series.policy import RetentionPolicy
from made_series import Made, descriptor


class Watched(Made):
    """A run whose catalogue the kernel tells of changes."""

    def __init__(self, path: Path) -> None:
        self.watch = NameWatch()
        super().__init__(path)

    def reopen(self) -> list[str]:
        self.catalogue = Catalogue(self.root, self.run, watch=self.watch)
        self.problems = self.catalogue.open()
        return self.problems

    def round(self, step: int, policy: RetentionPolicy) -> list[str]:
        """All that the daemon does for one snapshot; what it removed."""
        name = self.commit(step, metrics={"loss": float(step)}).name
        self.catalogue.write_index()
        self.catalogue.summary()
        assert self.verify(name) == "verified"
        gone = [one.name for one in self.catalogue.apply_retention(policy)]
        self.catalogue.write_index()
        self.catalogue.summary()
        return gone


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Watched]:
    run = Watched(tmp_path / "root")
    yield run
    run.watch.close()


def filled(made: Watched, count: int) -> RetentionPolicy:
    """With so many, each verified, and one more to go with each round."""
    policy = RetentionPolicy(keep_last=count, keep_best=2, monitor="loss", mode="min")
    for step in range(1, count + 1):
        made.commit(step, verify=True, metrics={"loss": float(step)})
    for step in range(count + 1, count + 5):
        made.round(step, policy)
    return policy


def calls_of(made: Watched, step: int, policy: RetentionPolicy) -> int:
    """Of functions, Python's and C's, in this round."""
    counted = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        made.round(step, policy)
    finally:
        sys.setprofile(None)
    return counted


def test_a_commit_with_its_retention_takes_as_many_calls_among_many_as_among_few(tmp_path: Path) -> None:
    calls = []
    for count in (10, 60):
        made = Watched(tmp_path / str(count))
        policy = filled(made, count)
        calls.append(min(calls_of(made, step, policy) for step in range(count + 5, count + 8)))
        made.watch.close()
    few, many = calls
    assert many < few + 50, "something is called for each of them"


def test_a_commit_with_its_retention_lists_nothing_and_opens_nothing_else(
    made: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = filled(made, 12)
    listed: list[str] = []
    for call in (os.scandir, os.listdir):

        def counted(path: Any, call: Any = call) -> Any:
            listed.append(str(path))
            return call(path)

        monkeypatch.setattr(os, call.__name__, counted)
    assert made.round(17, policy) == ["step-000000005"]
    assert str(made.dir) not in listed


def test_index_json_is_written_once_in_many_commits_and_less_often_in_a_larger_run(
    made: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = filled(made, 8)
    monkeypatch.setattr(index_file, "_MOST_RECENT", 0)
    assert indexes_of(made, range(13, 25), policy) > 3  # the root of 8 is 2
    monkeypatch.setattr(index_file, "isqrt", lambda count: 5 * isqrt(count))
    assert indexes_of(made, range(25, 37), policy) <= 3


def indexes_of(made: Watched, steps: range, policy: RetentionPolicy) -> int:
    """How many there were one after the other."""
    written = set()
    for step in steps:
        made.round(step, policy)
        written.add((made.dir / "index.json").read_bytes())
    return len(written)


def test_what_others_put_in_or_take_away_is_seen_at_the_next_look_without_a_listing_before(
    made: Watched, tmp_path: Path
) -> None:
    policy = RetentionPolicy(keep_last=2)
    for step in (1, 2, 3):
        made.commit(step, verify=True)
    assert made.catalogue.rescan() == []
    assert made.catalogue.listed == 0
    other = Made(tmp_path / "other")
    shutil.copytree(other.commit(70).path, made.dir / "step-000000070")
    assert made.catalogue.rescan() == ["step-000000070"]
    shutil.rmtree(made.dir / "step-000000003")
    assert [one.step for one in made.catalogue.apply_retention(policy)] == []
    assert made.catalogue.summary()["last_committed"]["step"] == 2
    assert made.catalogue.rescan() == []
    assert made.catalogue.listed == 0


def test_a_folder_in_the_place_of_a_known_one_is_seen_though_its_name_is_the_same(
    made: Watched, tmp_path: Path
) -> None:
    made.commit(1, verify=True)
    made.commit(2, verify=True)
    other = Made(tmp_path / "other")
    shutil.copytree(other.commit(1).path, tmp_path / "kept")
    (made.dir / "step-000000001").rename(tmp_path / "away")
    (tmp_path / "kept").rename(made.dir / "step-000000001")
    made.catalogue.rescan()
    assert ["another run" in problem for problem in made.catalogue.summary()["problems"]] == [True]


def test_a_folder_that_came_in_the_place_of_another_while_events_were_lost_is_seen(
    made: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.commit(1, verify=True)
    made.commit(2, verify=True)
    made.catalogue.rescan()
    other = Made(tmp_path / "other")
    shutil.copytree(other.commit(1).path, tmp_path / "kept")
    (made.dir / "step-000000001").rename(tmp_path / "away")
    (tmp_path / "kept").rename(made.dir / "step-000000001")
    answers = [struct.pack("=iIII", -1, 0x4000, 0, 0), b""]  # the queue's overflow, in place of what it held
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda *_: answers.pop(0))
        assert not made.catalogue._view.folder.are_known(made.catalogue._view.known.entries)
    made.watch.take()
    made.catalogue._view.folder._followed.changed()  # type: ignore[union-attr]
    assert made.catalogue._view.newest() is None
    made.catalogue.rescan()
    assert ["another run" in problem for problem in made.catalogue.summary()["problems"]] == [True]


def test_a_folder_with_the_inode_of_the_one_before_is_told_by_its_time(made: Watched) -> None:
    """As a file system gives it to the folder that is made after another was removed."""
    entry = made.commit(1, verify=True)
    made.catalogue.rescan()
    view = made.catalogue._view
    for later, same in ((0, True), (1, False)):
        entry.path.rename(made.dir / "away")
        (made.dir / "away").rename(entry.path)
        inode, time = folder_identity(entry.path.lstat()).split(" ")
        known = replace(view.known.entries[entry.name], identity=f"{inode} {int(time) - later}")
        assert view.folder.are_known({entry.name: known}) is same


def test_what_is_copied_into_a_known_folder_is_seen_once_the_copy_is_whole(made: Watched) -> None:
    """As rsync and cp -a do it: they set the folder's times last, and no name in the run's folder changes."""
    made.commit(1, verify=True)
    old = made.commit(2, verify=True).path
    made.catalogue.rescan()
    index = replace(read_index(old), sequence=9, parent=1, lineage=((1, 9),), snapshot=9)
    (old / ".index.json.x").write_bytes(index_to_bytes(index))
    (old / ".index.json.x").rename(old / "index.json")
    os.utime(old, (1, 1))
    made.catalogue.rescan()
    assert made.catalogue.highest_sequence == 9


def test_what_was_replaced_while_the_run_was_elsewhere_is_seen_and_the_run_followed_again(
    made: Watched, tmp_path: Path
) -> None:
    for step in (1, 2):
        made.commit(step, verify=True)
    other = Made(tmp_path / "other")
    made.dir.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "step-000000001").rename(tmp_path / "away")
    shutil.copytree(other.commit(1).path, tmp_path / "elsewhere" / "step-000000001")
    (tmp_path / "elsewhere").rename(made.dir)
    made.catalogue.rescan()
    assert ["another run" in problem for problem in made.catalogue.summary()["problems"]] == [True]
    made.catalogue.rescan()
    assert made.catalogue.listed == 0


def test_what_could_not_be_read_when_names_changed_is_looked_at_again(
    made: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.commit(1, verify=True)
    name = made.commit(2, verify=True).name
    shutil.rmtree(made.dir / name)
    real = os.scandir

    def fails(path: Any) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        with pytest.raises(OSError, match="Input/output"):
            made.catalogue.rescan()
    assert os.scandir is real
    made.catalogue.rescan()
    assert made.catalogue.summary()["checkpoints"] == 1


def test_the_same_step_gets_a_number_above_those_that_are_there_whoever_has_them(
    made: Watched, tmp_path: Path
) -> None:
    names = [made.commit(5, verify=True).name for _ in range(3)]
    assert names == ["step-000000005", "step-000000005.2", "step-000000005.3"]
    shutil.rmtree(made.dir / "step-000000005.2")
    (made.dir / "step-000000005.4").write_text("a file")
    assert made.commit(5).name == "step-000000005.5"
    other = Made(tmp_path / "other")
    shutil.copytree(other.commit(5).path, made.dir / "step-000000005.9")
    assert made.commit(5).name == "step-000000005.10"


def test_where_the_clients_own_newest_is_the_head_its_next_place_is_the_one_worked_out_from_all(
    made: Watched,
) -> None:
    """And where it isn't, that one is taken."""
    other = "d" * 32
    story: list[tuple[str, int | None, int]] = [
        ("c" * 32, None, 0), ("c" * 32, None, 0), ("c" * 32, None, 0), (other, 2, 3), (other, 2, 3), ("e" * 32, None, 0),
        ("c" * 32, None, 0), (other, 2, 3), (other, 1, 9), (other, 1, 9),
    ]  # fmt: skip
    for step, (client_id, base, base_snapshot) in enumerate(story, 1):
        snap = descriptor(step, step, client_id=client_id, base=base, base_snapshot=base_snapshot)
        sequence = made.catalogue.highest_sequence + 1
        plain = Catalogue(made.root, made.run)
        plain.open()
        plain._view.going_on = lambda *_: None  # type: ignore[method-assign]
        wanted, given = plain.position_for(snap, sequence), made.catalogue.position_for(snap, sequence)
        assert (given.parent, given.lineage, given.forks) == (wanted.parent, wanted.lineage, wanted.forks)
        committed = commit_snapshot(made.dir, snap, memoryview(bytes(64)), given)
        made.catalogue.added(committed)
        assert made.catalogue.apply_report(check(committed.path)) == "verified"
