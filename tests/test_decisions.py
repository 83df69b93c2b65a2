from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.disk import durable
from ckptd.disk.decisions import Fork, read_decisions, write_birth, write_fork

RUN_ID = "ab" * 16


def files(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "decisions").iterdir())


def test_a_run_without_decisions_has_none(tmp_path: Path) -> None:
    found = read_decisions(tmp_path / "never")
    assert (found.birth_run_id, found.forks, found.highest_sequence, found.unreadable) == (None, (), 0, ())


def test_birth_and_forks_come_back_in_order(tmp_path: Path) -> None:
    write_birth(tmp_path, RUN_ID)
    write_fork(tmp_path, 12, 3, "step-000000400")
    write_fork(tmp_path, 8, None, "step-000000001.2")
    found = read_decisions(tmp_path)
    assert found.birth_run_id == RUN_ID
    assert found.forks == (Fork(8, None, "step-000000001.2"), Fork(12, 3, "step-000000400"))
    assert found.highest_sequence == 12


def test_the_same_fork_is_recorded_once(tmp_path: Path) -> None:
    for _ in range(3):
        write_fork(tmp_path, 8, 3, "step-000000400")
    assert len(files(tmp_path)) == 1


def test_a_fork_whose_sync_failed_is_synced_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = durable.fsync_dir, [tmp_path / "decisions"]
    (tmp_path / "decisions").mkdir()

    def fsync_dir(path: Path) -> None:
        if path in failing:
            raise durable.FsyncFailed(5, "Input/output error")
        real(path)

    monkeypatch.setattr(durable, "fsync_dir", fsync_dir)
    for _ in range(2):
        with pytest.raises(durable.FsyncFailed):
            write_fork(tmp_path, 5, 2, "step-000000003")
    failing.clear()
    write_fork(tmp_path, 5, 2, "step-000000003")
    assert len(list((tmp_path / "decisions").iterdir())) == 1


def test_any_changed_byte_makes_a_decision_unreadable_and_is_never_ignored(tmp_path: Path) -> None:
    write_fork(tmp_path, 8, 3, "step-000000400")
    (path,) = files(tmp_path)
    data = path.read_bytes()
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 0x04
        path.write_bytes(wrong)
        found = read_decisions(tmp_path)
        assert found.forks == ()
        assert [name for name, _ in found.unreadable] == [path.name]
        assert found.highest_sequence == 8
    path.write_bytes(b"")
    assert len(read_decisions(tmp_path).unreadable) == 1


def test_a_decision_moved_to_another_sequence_is_unreadable(tmp_path: Path) -> None:
    write_fork(tmp_path, 8, 3, "step-000000400")
    (path,) = files(tmp_path)
    path.rename(path.with_name(path.name.replace("000000000008", "000000000009")))
    assert len(read_decisions(tmp_path).unreadable) == 1


def test_a_kind_of_a_later_version_counts_as_unreadable(tmp_path: Path) -> None:
    write_birth(tmp_path, RUN_ID)
    (path,) = files(tmp_path)
    path.rename(path.with_name("000000000007-pin-0123abcd.json"))
    found = read_decisions(tmp_path)
    assert len(found.unreadable) == 1
    assert found.highest_sequence == 7


def test_two_births_are_unreadable(tmp_path: Path) -> None:
    write_birth(tmp_path, RUN_ID)
    write_birth(tmp_path, "cd" * 16)
    assert len(read_decisions(tmp_path).unreadable) == 1


def test_what_a_crash_left_and_other_names_are_ignored(tmp_path: Path) -> None:
    write_birth(tmp_path, RUN_ID)
    folder = tmp_path / "decisions"
    for name in (".tmp-8-" + "0" * 32, "README", ".nfs0001", "8-fork-0123abcd.json"):
        (folder / name).write_text("half")
    found = read_decisions(tmp_path)
    assert found.unreadable == ()
    assert found.birth_run_id == RUN_ID


def test_a_decision_that_is_a_link_is_unreadable(tmp_path: Path) -> None:
    write_birth(tmp_path / "other", RUN_ID)
    (target,) = files(tmp_path / "other")
    (tmp_path / "decisions").mkdir()
    (tmp_path / "decisions" / target.name).symlink_to(target)
    assert len(read_decisions(tmp_path).unreadable) == 1


def test_no_permission_to_list_them_is_an_error_not_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "decisions").write_text("not a folder")
    with pytest.raises(OSError):
        read_decisions(tmp_path)
