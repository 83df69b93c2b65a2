"""newest.json stands for the names in the run's folder only while nothing can have changed behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import newest_file
from ckptd.disk.newest_file import FolderState, Newest, note_newest, read_newest
from ckptd.names import NEWEST_FILE
from fake_daemon import wait_until

NEWEST = Newest(name="step-000000001", sequence=1, token="step-000000001:7", mark=None)


def noted(run: Path) -> Newest | None:
    return read_newest(run, FolderState.of(run))


def note(run: Path) -> None:
    """As soon as the clock of the file system has gone on."""
    wait_until(lambda: note_newest(run, lambda: NEWEST))


def test_what_was_noted_is_read_until_a_name_changes(tmp_path: Path) -> None:
    assert noted(tmp_path) is None
    note(tmp_path)
    found = noted(tmp_path)
    assert found is not None
    assert (found.name, found.sequence, found.token, found.mark) == (NEWEST.name, 1, NEWEST.token, None)
    (tmp_path / "step-000000002").mkdir()
    assert noted(tmp_path) is None
    note(tmp_path)
    assert noted(tmp_path) is not None


def test_nothing_is_noted_within_the_time_of_the_last_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path)
    state = FolderState.of(tmp_path)
    at = os.stat(tmp_path / NEWEST_FILE).st_mtime_ns
    for ctime_ns, good in ((at + 60 * 10**9 + 1, False), (state.ctime_ns, True)):
        seen = FolderState(state.place, state.mtime_ns, ctime_ns)
        monkeypatch.setattr(FolderState, "of", lambda _, seen=seen: seen)
        assert note_newest(tmp_path, lambda: NEWEST) is good
        assert (noted(tmp_path) is not None) is good


def test_nothing_is_noted_where_times_are_whole_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FolderState, "of", lambda _: FolderState((1, 1), 10**9, 10**9))
    assert not note_newest(tmp_path, lambda: NEWEST)


def test_nothing_is_noted_when_a_name_changes_while_they_are_looked_at(tmp_path: Path) -> None:
    note(tmp_path)

    def changes() -> Newest:
        (tmp_path / "step-000000002").mkdir(exist_ok=True)
        os.rmdir(tmp_path / "step-000000002")
        return NEWEST

    for _ in range(3):
        assert not note_newest(tmp_path, changes)
        assert noted(tmp_path) is None


def test_who_cannot_tell_takes_back_what_was_noted(tmp_path: Path) -> None:
    note(tmp_path)
    assert not note_newest(tmp_path, lambda: None)
    assert noted(tmp_path) is None


@pytest.mark.parametrize("what", ["cut", "flipped", "other boot", "empty", "link"])
def test_a_note_that_is_not_whole_or_of_another_boot_is_none(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path)
    path = tmp_path / NEWEST_FILE
    data = bytearray(path.read_bytes())
    data[data.index(b'"sequence":1') + 11] ^= 3
    if what == "other boot":
        monkeypatch.setattr(newest_file, "_boot", lambda: "another")
    elif what == "link":
        path.unlink()
        path.symlink_to("nowhere")
        with pytest.raises(OSError, match="symbolic"):
            note_newest(tmp_path, lambda: NEWEST)
    else:
        path.write_bytes({"cut": bytes(data[:50]), "flipped": bytes(data), "empty": b""}[what])
    assert noted(tmp_path) is None


def test_names_are_looked_at_once_nobody_is_in_the_middle_of_changing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup of a name that nobody knows waits for the folder's lock; before that, an event may be still to come."""
    note(tmp_path)
    calls: list[str] = []
    real = os.lstat

    def seen(path: Any, **more: Any) -> os.stat_result:
        if ".look-" in str(path):
            calls.append("waited")
        return real(path, **more)

    monkeypatch.setattr(os, "lstat", seen)
    assert note_newest(tmp_path, lambda: calls.append("looked") or NEWEST)  # type: ignore[func-returns-value]
    assert calls == ["waited", "looked"]


@pytest.mark.parametrize("what", ["fifo", "hard link", "folder"])
def test_what_has_the_notes_name_and_is_not_its_own_file_stays_as_it_is(tmp_path: Path, what: str) -> None:
    path, other = tmp_path / NEWEST_FILE, tmp_path / "other"
    other.write_text("somebody's")
    {"fifo": os.mkfifo, "hard link": lambda at: os.link(other, at), "folder": os.mkdir}[what](path)
    for _ in range(2):
        if what == "folder":
            with pytest.raises(IsADirectoryError):
                note_newest(tmp_path, lambda: NEWEST)
        else:
            assert not note_newest(tmp_path, lambda: NEWEST)
    assert noted(tmp_path) is None
    assert other.read_text() == "somebody's"
