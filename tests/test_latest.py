from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.run_index import RunIndex, Summary, read_run_index, write_run_index
from ckptd.disk.series import best, checkpoints, latest_valid, read_series
from ckptd.errors import BadRoot, InvalidArgument, NoValidCheckpoint
from run_damage import DAMAGES, flip, mark
from snapshots import RUN_ID, Writer, sharded


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def latest(writer: Writer, **more: Any) -> Any:
    return latest_valid(writer.root.path, **more)


# --- latest ---------------------------------------------------------------------------------------


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert latest_valid(tmp_path / "never") is None
    writer = Writer(tmp_path / "root")
    assert latest(writer) is None
    assert latest(writer, wait=False) is None
    assert latest_valid(writer.root.path, "another") is None
    assert checkpoints(writer.root.path) == []


def test_a_root_that_is_a_file_and_a_name_that_is_none_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRoot):
        latest_valid(tmp_path / "file")
    for run in ("..", "../x", "A"):
        with pytest.raises(InvalidArgument):
            latest_valid(tmp_path, run)


def test_the_newest_is_the_latest_whatever_its_step_mtime_and_spelling(writer: Writer) -> None:
    for step in (9, 10, 99, 100, 10000, 1000):
        done = writer.commit(step, base_sequence=None)
        os.utime(done.path, ns=(step, step))
    found = latest(writer)
    assert (found.step, found.sequence, found.run) == (1000, 6, "default")
    assert found.passed_over == ()
    assert found.metrics == {"loss": 1 / 1001}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_newest_is_passed_over_with_its_reason(writer: Writer, damage: str) -> None:
    for step in (1, 2, 3):
        writer.commit(step, make=sharded)
    DAMAGES[damage](writer.run_dir / "step-000000003")
    found = latest(writer)
    assert found.name == "step-000000002"
    if "temp" not in damage:
        assert [passed.name for passed in found.passed_over] == ["step-000000003"]
        assert found.passed_over[0].reason
    DAMAGES["a bit in the index"](writer.run_dir / "step-000000002")
    found = latest(writer)
    assert found.name == "step-000000001"
    assert "step-000000002" in [passed.name for passed in found.passed_over]


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"only a temp folder left"}))
def test_all_damaged_is_an_error_of_its_own_never_none(writer: Writer, damage: str) -> None:
    for step in (1, 2):
        DAMAGES[damage](writer.commit(step, make=sharded).path)
    with pytest.raises(NoValidCheckpoint, match="step-000000001"):
        latest(writer)


@pytest.mark.parametrize("wait", [True, False])
def test_what_shows_without_reading_is_an_error_also_without_waiting(writer: Writer, wait: bool) -> None:
    DAMAGES["a bit in the index"](writer.commit(1).path)
    with pytest.raises(NoValidCheckpoint, match="step-000000001"):
        latest(writer, wait=wait)
    writer.commit(2)
    if not wait:
        assert latest(writer, wait=False) is None  # nothing is known of step 2 yet


def test_without_waiting_only_what_is_marked_verified_counts(writer: Writer) -> None:
    for step in (1, 2, 3):
        writer.commit(step)
    assert latest(writer, wait=False) is None
    mark(writer, "step-000000001", "step-000000002")
    found = latest(writer, wait=False)
    assert found.name == "step-000000002"
    assert [passed.name for passed in found.passed_over] == ["step-000000003"]
    said: list[str] = []
    assert latest(writer, on_progress=said.append).name == "step-000000003"
    assert said == ["verifying step-000000003"]


def test_a_mark_counts_only_for_exactly_what_was_verified(writer: Writer) -> None:
    writer.commit(1)
    for wrong in (
        {"sequence": 2},
        {"index_sha256": "0" * 64},
        {"stat_signature": "x"},
        {"name": "step-000000002"},
    ):
        mark(writer, "step-000000001", **wrong)
        assert latest(writer, wait=False) is None
    mark(writer, "step-000000001")
    assert latest(writer, wait=False).verified
    flip(writer.run_dir / "step-000000001" / "ckpt.pt")  # whoever changes a file changes its times
    assert latest(writer, wait=False) is None
    with pytest.raises(NoValidCheckpoint):
        latest(writer)


@pytest.mark.parametrize(
    "data", [None, b"", b"garbage", b"{}", b'{"schema": "ckpt.v2-run-index"}', b"\x00" * 4096]
)
def test_a_run_index_that_is_gone_or_wrong_costs_nothing(writer: Writer, data: bytes | None) -> None:
    for step in (1, 2):
        writer.commit(step)
    if data is not None:
        (writer.run_dir / "index.json").write_bytes(data)
    assert read_run_index(writer.run_dir) is None
    assert latest(writer).name == "step-000000002"
    assert read_series(writer.root, "default").next_sequence == 3


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_run_index_that_is_no_file_is_none_and_nothing_waits_for_it(writer: Writer, kind: str) -> None:
    writer.commit(1)
    mark(writer, "step-000000001")
    path = writer.run_dir / "index.json"
    if kind == "link":
        path.rename(writer.root.path / "elsewhere.json")
        path.symlink_to(writer.root.path / "elsewhere.json")
    else:
        path.unlink()
        os.mkfifo(path)
    assert read_run_index(writer.run_dir) is None
    assert latest(writer).name == "step-000000001"


def test_any_changed_byte_of_a_run_index_makes_it_none(writer: Writer) -> None:
    writer.commit(1)
    summary = Summary(
        name="step-000000001", step=1, sequence=1, saved_at=1.0, bytes=7, metrics={"a": math.inf, "b": 0.5}
    )
    index = RunIndex(run="default", run_id=RUN_ID, highest_sequence=44, checkpoints=(summary,))
    write_run_index(writer.run_dir, index)
    assert read_run_index(writer.run_dir) == index
    assert read_series(writer.root, "default").next_sequence == 45
    path = writer.run_dir / "index.json"
    data = path.read_bytes()
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 0x04
        path.write_bytes(wrong)
        assert read_run_index(writer.run_dir) is None, f"byte {at}"


def test_reading_a_run_writes_nothing(writer: Writer) -> None:
    writer.commit(1)

    def everything() -> list[tuple[str, int]]:
        return sorted((str(path), path.lstat().st_mtime_ns) for path in writer.root.path.rglob("*"))

    before = everything()
    latest(writer)
    checkpoints(writer.root.path)
    best(writer.root.path, "default", "loss", "min")
    assert everything() == before
