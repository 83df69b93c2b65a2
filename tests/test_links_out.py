"""A link in the place of a folder we write into would lead checkpoints, or what is said of them, out of the root."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckptd.disk.commit import Position, commit_snapshot
from ckptd.disk.decisions import read_decisions, write_birth, write_fork
from ckptd.disk.durable import make_real_dir
from ckptd.errors import SaveFailed
from ckptd.names import DECISIONS_DIR, QUARANTINE_DIR
from made_series import Made, descriptor, flip_byte


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def test_a_corrupt_checkpoint_stays_and_is_said_when_the_quarantine_is_a_link(
    tmp_path: Path, outside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(tmp_path / "root")
    made.commit(1, verify=True)
    bad = made.commit(2)
    flip_byte(bad.path / "ckpt.pt")
    (made.dir / QUARANTINE_DIR).symlink_to(outside)
    with caplog.at_level(logging.WARNING):
        assert made.verify(bad.name) == "corrupt"
    assert bad.path.is_dir() and not list(outside.iterdir())
    assert any(bad.name in problem for problem in made.catalogue.summary()["problems"])
    assert "checkpoint.not_moved" in caplog.text and "would leave the root" in caplog.text


def test_no_decision_is_written_through_a_link(tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "root" / "r"
    run.mkdir(parents=True)
    (run / DECISIONS_DIR).symlink_to(outside)
    with pytest.raises(NotADirectoryError):
        write_birth(run, "0" * 32)
    with pytest.raises(NotADirectoryError):
        write_fork(run, 3, 1, "step-000000003")
    assert not list(outside.iterdir())


def test_a_run_that_is_a_link_is_neither_opened_nor_written_to(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "r").symlink_to(outside)
    with pytest.raises(NotADirectoryError, match="would leave the root"):
        Made(tmp_path / "root")
    with pytest.raises(SaveFailed, match="would leave the root"):
        commit_snapshot(
            tmp_path / "root" / "r", descriptor(1, 1), memoryview(bytes(64)), Position.alone("0" * 32)
        )
    assert not list(outside.iterdir())


def test_a_root_that_is_a_link_is_fine(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    made = Made(tmp_path / "link")
    made.commit(1, verify=True)
    assert made.dir.parent == outside and read_decisions(made.dir).birth_run_id


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_make_real_dir_refuses_what_is_no_folder(tmp_path: Path, outside: Path, kind: str) -> None:
    path = tmp_path / "x"
    match kind:
        case "link":
            path.symlink_to(outside)
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case _:
            path.touch()
    with pytest.raises(NotADirectoryError):
        make_real_dir(path)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(FileNotFoundError):  # what is above may have been moved away: it isn't made again
        make_real_dir(tmp_path / "new" / "deep")
    make_real_dir(tmp_path / "new")
    make_real_dir(tmp_path / "new")
