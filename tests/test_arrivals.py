"""Checkpoints that somebody copies into a run while its daemon looks on: left alone until they rest."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from ckptd.disk.rootdir import Root
from ckptd_daemon.core.disk import Disk
from ckptd_daemon.series.arrivals import STILL_FOR_S
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.settings_file import Settings
from fake_catalogue import FakeCatalogue
from made_series import Made, flip_byte

NAME = "step-000000002"


class Copied(Made):
    """A run of three; the second lies elsewhere, to be copied back, and the clock is a number."""

    def __init__(self, path: Path) -> None:
        super().__init__(path / "root")
        self.clock = 0.0
        for step in (1, 2, 3):
            self.commit(step, verify=step != 2)
        self.backup = path / "backup"
        (self.dir / NAME).rename(self.backup)
        self.reopen()

    def reopen(self) -> list[str]:
        self.catalogue = Catalogue(self.root, self.run, now=lambda: self.clock)
        return self.catalogue.open()

    def begin(self) -> None:
        """As cp does: a folder, and what comes first by name or luck."""
        (self.dir / NAME).mkdir()
        shutil.copy2(self.backup / "index.json", self.dir / NAME)

    def finish(self) -> None:
        for path in self.backup.iterdir():
            shutil.copy2(path, self.dir / NAME)

    def keep_up(self) -> None:
        self.catalogue.apply_retention(RetentionPolicy(keep_last=9))


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def test_a_copy_that_pauses_is_left_alone_and_adopted_when_it_is_whole(
    copied: Copied, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    copied.begin()
    assert copied.verify(NAME) == "corrupt" and copied.catalogue.holds_back
    assert "checkpoint.left_alone" in caplog.text
    copied.clock = STILL_FOR_S - 1
    copied.keep_up()
    assert NAME in copied.names
    copied.finish()
    assert copied.verify(NAME) == "verified" and not copied.catalogue.holds_back


def test_one_that_was_half_there_at_the_start_is_left_alone_too(copied: Copied) -> None:
    copied.begin()
    copied.reopen()
    assert copied.verify(NAME) == "corrupt" and NAME in copied.names


def test_a_file_that_grows_begins_the_wait_anew_and_one_that_rests_long_goes_to_quarantine(
    copied: Copied,
) -> None:
    copied.begin()
    copied.verify(NAME)
    copied.clock = STILL_FOR_S - 1
    (copied.dir / NAME / "ckpt.pt").write_bytes(b"the beginning")
    assert copied.verify(NAME) == "corrupt"
    copied.clock = STILL_FOR_S + 1
    copied.keep_up()
    assert NAME in copied.names and copied.catalogue.holds_back
    copied.clock = 2 * STILL_FOR_S
    copied.keep_up()
    assert NAME not in copied.names and not copied.catalogue.holds_back


def test_a_growing_copy_is_not_moved_although_its_wait_is_over(copied: Copied) -> None:
    copied.begin()
    copied.verify(NAME)
    (copied.dir / NAME / "ckpt.pt").write_bytes(b"the beginning")
    copied.clock = 2 * STILL_FOR_S
    copied.keep_up()
    assert NAME in copied.names


@pytest.mark.parametrize("how", ["written here", "whole at the start", "whole when it was copied in"])
def test_one_that_was_whole_here_goes_to_quarantine_at_once_when_it_is_damaged(
    copied: Copied, how: str
) -> None:
    name = NAME
    if how == "written here":
        name = copied.commit(4).name
        copied.commit(5)
    else:
        copied.begin()
        copied.finish()
    if how == "whole at the start":
        copied.reopen()
    if how == "whole when it was copied in":
        assert copied.verify(NAME) == "verified"
    flip_byte(copied.dir / name / "ckpt.pt")
    assert copied.verify(name) == "corrupt" and name not in copied.names


def test_one_that_came_again_is_another_one_though_it_has_the_inode(copied: Copied, tmp_path: Path) -> None:
    copied.begin()
    copied.finish()
    assert copied.verify(NAME) == "verified"
    folder, elsewhere = copied.dir / NAME, tmp_path / "elsewhere"
    folder.rename(elsewhere)
    copied.keep_up()
    with (elsewhere / "ckpt.pt").open("r+b") as half:
        half.truncate(1000)
    elsewhere.rename(folder)
    assert copied.verify(NAME) == "corrupt" and NAME in copied.names


def test_the_disk_looks_again_while_something_is_left_alone(tmp_path: Path) -> None:
    fake = FakeCatalogue("r", [])
    disk = Disk(Root.open(tmp_path / "root", create=True), Settings(), catalogue=lambda *_: fake)  # type: ignore[arg-type, return-value]
    disk.open_run("r")
    fake.holds_back = True
    disk.keep_up("r")
    assert disk._upkeep.begin("r"), "retention is owed"
    fake.holds_back = False
    disk.keep_up("r")
    assert not disk._upkeep.begin("r")
