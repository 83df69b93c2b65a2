"""What the kernel tells of a run's folder is what a listing would show; where it can't be relied on, that is said."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd_daemon.series import name_watch
from ckptd_daemon.series.name_watch import Followed, NameWatch
from open_files import open_files


@pytest.fixture
def watch() -> Iterator[NameWatch]:
    made = NameWatch()
    yield made
    made.close()


@pytest.fixture
def followed(watch: NameWatch, tmp_path: Path) -> Followed:
    (tmp_path / "run").mkdir()
    found = watch.follow(tmp_path / "run")
    assert found is not None
    return found


def test_every_name_that_came_went_or_was_renamed_is_told_once(followed: Followed, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert followed.changed() == set()
    (run / "made").mkdir()
    (run / "made" / "inside").touch()
    assert followed.changed() == {"made"}
    (run / "made").rename(run / "other")
    (tmp_path / "from elsewhere").mkdir()
    (tmp_path / "from elsewhere").rename(run / "came")
    assert followed.changed() == {"made", "other", "came"}
    shutil.rmtree(run / "other")
    (run / "came").rename(tmp_path / "away")
    assert followed.changed() == {"other", "came"}
    assert followed.changed() == set()


def test_two_folders_are_told_apart(watch: NameWatch, followed: Followed, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    second = watch.follow(tmp_path / "second")
    assert second is not None
    (tmp_path / "run" / "a").touch()
    (tmp_path / "second" / "b").touch()
    assert (second.changed(), followed.changed()) == ({"b"}, {"a"})
    second.stop()
    (tmp_path / "second" / "c").touch()
    assert second.changed() is None
    assert followed.changed() == set()


def test_a_folder_that_is_followed_again_is_told_to_the_last_who_asked(
    watch: NameWatch, followed: Followed, tmp_path: Path
) -> None:
    """The kernel tells of a folder once: by another path, too."""
    again = watch.follow(tmp_path / "run")
    assert again is not None
    (tmp_path / "run" / "a").touch()
    assert followed.changed() is None
    assert followed.ended
    followed.stop()
    assert again.changed() == {"a"}


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_nothing_is_told_of_a_folder_that_is_not_at_its_path_any_more(
    followed: Followed, tmp_path: Path, how: str
) -> None:
    if how == "removed":
        (tmp_path / "run").rmdir()
    else:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    if how == "replaced":
        (tmp_path / "run").mkdir()
    assert followed.changed() is None
    (tmp_path / "run").mkdir(exist_ok=True)
    assert followed.changed() is None


def test_events_that_were_lost_are_said_to_every_folder_once(
    watch: NameWatch, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [struct.pack("=iIII", -1, 0x4000, 0, 0), b""]
    with monkeypatch.context() as patch:
        patch.setattr(os, "read", lambda *_: answers.pop(0))
        assert followed.changed() is None
    assert followed.changed() == set()


def test_too_many_names_to_keep_are_to_be_listed(
    followed: Followed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_watch, "_MOST_NAMES", 2)
    for name in "abc":
        (tmp_path / "run" / name).touch()
    assert followed.changed() is None
    assert followed.changed() == set()


def test_where_the_kernel_has_no_queue_left_it_is_said_and_nothing_is_followed(
    watch: NameWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoneLeft:
        statfs = name_watch._libc.statfs

        @staticmethod
        def inotify_init1(_flags: int) -> int:
            ctypes.set_errno(errno.EMFILE)
            return -1

    monkeypatch.setattr(name_watch, "_libc", NoneLeft)
    assert watch.follow(tmp_path) is None
    assert "names.not_watched" in caplog.text


def test_a_file_system_that_other_machines_change_is_listed(
    watch: NameWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.follow(Path("/proc/self")) is None  # as any that isn't known to be this machine's alone


def queues() -> int:
    """How many this process has."""
    return sum("inotify" in where for where in open_files(os.getpid()))


def test_a_queue_is_given_back_once_it_is_closed_or_forgotten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    gc.collect()  # what other tests have left isn't this one's
    before = queues()
    closed, forgotten = NameWatch(), NameWatch()
    followed = closed.follow(tmp_path / "run"), forgotten.follow(tmp_path / "run")
    assert queues() == before + 2
    closed.close()
    closed.close()
    assert queues() == before + 1
    del forgotten, followed
    assert queues() == before
