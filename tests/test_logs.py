"""Logging: bounded in the daemon, silent in the trainer."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd_daemon.core import logs
from ckptd_daemon.core.dropped import SAY_EVERY_S, Dropped
from ckptd_daemon.core.logs import Logs

log = logging.getLogger("ckptd_daemon.test")


def test_dropped_messages_cost_one_line_per_kind_and_while_and_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = [100.0]
    dropped = Dropped(lambda: clock[0])
    for _ in range(1000):
        dropped.note("frames", "3 frames")
        dropped.note("Refused", "gone")
    clock[0] += SAY_EVERY_S
    dropped.note("frames", "3 frames")
    assert [record.getMessage() for record in caplog.records] == [
        "message.dropped kind=frames count=1 reason=3 frames",
        "message.dropped kind=Refused count=1 reason=gone",
        "message.dropped kind=frames count=1000 reason=3 frames",
    ]


def test_the_log_and_the_one_before_it_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 1000)
    with Logs(tmp_path / "daemon.log", to_stdout=False):
        for number in range(500):
            log.info("line number=%d", number)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["daemon.log", "daemon.log.1"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert "number=499" in files[0].read_text()


def test_what_somebody_sends_can_not_begin_a_line_nor_speak_to_a_terminal(tmp_path: Path) -> None:
    with Logs(tmp_path / "daemon.log", to_stdout=False):
        log.info(
            "request.refused error=%s",
            "x\n2026-01-01T00:00:00Z INFO all.well \x1b]0;title\x07 \ud800 \u202e é",
        )
        try:
            raise ValueError("inner")
        except ValueError:
            log.exception("daemon.fault")
    lines = (tmp_path / "daemon.log").read_text().splitlines()
    assert lines[0].endswith(r"error=x\n2026-01-01T00:00:00Z INFO all.well \x1b]0;title\x07 \ud800 \u202e é")
    assert (
        "daemon.fault" in lines[1] and lines[2].startswith("Traceback") and lines[-1] == "ValueError: inner"
    )


def test_a_log_that_was_removed_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    with Logs(path, to_stdout=False) as entered:
        log.info("first")
        entered.flush()
        path.unlink()
        log.info("second")
    assert "second" in path.read_text()


@pytest.mark.timeout(100)
def test_a_pipe_in_the_logs_place_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "daemon.log")
    with Logs(tmp_path / "daemon.log", to_stdout=False):
        log.warning("nobody reads this")


def test_the_librarys_log_lines_do_not_print_by_themselves_in_a_trainer() -> None:
    code = "import logging, ckptd; logging.getLogger('ckptd.link.outbox').warning('outbox.something')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout == ""
    code = "import logging; logging.basicConfig(); " + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "outbox.something" in done.stderr  # who sets logging up still gets them


def test_a_log_that_can_not_be_looked_at_for_a_while_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with Logs(tmp_path / "daemon.log", to_stdout=False) as made:
        log.info("line number=1")
        made.flush()
        with monkeypatch.context() as without:
            without.setattr(Path, "exists", closed)
            log.info("line number=2")
            made.flush()
        log.info("line number=3")
    assert [line[-1] for line in (tmp_path / "daemon.log").read_text().splitlines()] == ["1", "2", "3"]
