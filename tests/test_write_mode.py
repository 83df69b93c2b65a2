from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk import write_mode
from ckptd.disk.leftovers import sweep
from ckptd.disk.write_mode import WriteMode
from ckptd.names import parse_work_folder


def fails(number: int) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def test_the_mode_is_found_out_by_writing_and_reading_back_and_nothing_is_left(tmp_path: Path) -> None:
    mode = WriteMode()
    assert (mode.now, mode.reason) == ("plain", "not found out yet")
    mode.find_out(tmp_path)
    assert mode.now == "direct" or mode.reason
    assert list(tmp_path.iterdir()) == []


def test_it_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = WriteMode()
    mode.find_out(tmp_path)
    monkeypatch.setattr(os, "open", fails(errno.EIO))
    mode.find_out(tmp_path)
    assert "could not" not in mode.reason


@pytest.mark.parametrize("number", write_mode.UNSUPPORTED)
@pytest.mark.parametrize(
    ("module", "refused"), [(write_mode, "set_direct"), (fcntl, "fcntl"), (os, "pwritev"), (os, "preadv")]
)
def test_without_o_direct_it_is_written_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, refused: str, number: int
) -> None:
    monkeypatch.setattr(module, refused, fails(number))
    mode = WriteMode()
    mode.find_out(tmp_path)
    assert mode.now == "early" and mode.reason.startswith("direct: ")
    assert list(tmp_path.iterdir()) == []


def test_without_both_it_is_plain_and_says_why_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_mode, "set_direct", fails(errno.EINVAL))
    monkeypatch.setattr(write_mode, "_sync_file_range", lambda: None)
    mode = WriteMode()
    mode.find_out(tmp_path)
    assert mode.now == "plain"
    assert mode.reason == "direct: Invalid argument; early: Function not implemented"


def test_a_file_system_that_reads_back_something_else_is_not_written_to_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def wrong(fd: int, buffers: Any, offset: int) -> int:
        count = real(fd, buffers, offset)
        buffers[0][5] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", wrong)
    mode = WriteMode()
    mode.find_out(tmp_path)
    assert mode.now == "early" and "was not what was read" in mode.reason


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_disk_that_is_full_or_broken_is_written_to_plainly_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    mode = WriteMode()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open" if number == errno.EMFILE else "pwritev", fails(number))
        mode.find_out(tmp_path)
    assert mode.now == "plain" and "could not be tried" in mode.reason
    assert list(tmp_path.iterdir()) == []
    mode.find_out(tmp_path)
    assert "could not be tried" not in mode.reason


def test_what_a_kill_leaves_of_it_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", fails(errno.EIO))
    WriteMode().find_out(tmp_path)
    (left,) = tmp_path.iterdir()
    assert parse_work_folder(left.name) is not None
    monkeypatch.undo()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_it_only_falls_back_and_once_for_several_files() -> None:
    mode = WriteMode("direct")
    assert mode.refused("direct", "EINVAL from a write") == "early"
    assert mode.refused("direct", "another") == "early"
    assert (mode.now, mode.reason) == ("early", "direct: EINVAL from a write")
    assert mode.refused("early", "gone") == "plain"
    assert mode.now == "plain"
