from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptd.decisions import write_birth
from ckptd.errors import BadRoot, InvalidArgument, NothingThere, NoValidCheckpoint
from ckptd.names import quarantine_folder, work_folder
from ckptd.run_index import Mark, RunIndex, Summary, read_run_index, write_run_index
from ckptd.series import best, candidates, checkpoints, latest_valid, read_series, runs, select
from ckptd.verification import check
from snapshots import RUN_ID, Writer, sharded

OTHER = "ef" * 16


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def latest(writer: Writer, **more: Any) -> Any:
    return latest_valid(writer.root.path, **more)


def quarantine(writer: Writer, name: str, sequence: int) -> None:
    folder = writer.run_dir / "quarantine"
    folder.mkdir(exist_ok=True)
    (writer.run_dir / name).rename(folder / quarantine_folder(name, sequence))


def mark(writer: Writer, *names: str, **changes: Any) -> None:
    entries = {entry.name: entry for entry in read_series(writer.root, writer.run).entries}
    marks = []
    for name in names:
        report = check(entries[name].path)
        assert report.sequence is not None
        fields = {
            "name": name, "sequence": report.sequence, "index_sha256": report.index_sha256,
            "stat_signature": report.stat_signature,
        }  # fmt: skip
        marks.append(Mark(**(fields | changes)))
    write_run_index(writer.run_dir, RunIndex(run=writer.run, run_id=RUN_ID, marks=tuple(marks)))


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one byte short": lambda path: truncate(path / "model.shard-000.pt"),
    "empty": lambda path: os.truncate(path / "model.shard-001.pt", 0),
    "a shard gone": lambda path: (path / "model.shard-000.pt").unlink(),
    "index gone": lambda path: (path / "index.json").unlink(),
    "a bit in the data": lambda path: flip(path / "model.shard-000.pt", 400),
    "a bit in a header": lambda path: flip(path / "meta.pt", 2),
    "a bit in the index": lambda path: flip(path / "index.json", 300),
    "a bit in the table": lambda path: flip(path / "tensors.json", 20),
    "only a temp folder left": lambda path: path.rename(path.with_name(work_folder("tmp", 9))),
}


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


# --- beside a writer ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_latest_polled_during_commits_and_deletions_is_never_none_and_always_whole(
    writer: Writer, keep: int
) -> None:
    writer.commit(1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def write_and_delete() -> None:
        try:
            kept = [writer.run_dir / "step-000000001"]
            for step in range(2, 120):
                kept.append(writer.commit(step).path)
                for path in kept[:-keep]:
                    trash = path.with_name(work_folder("trash", step))
                    path.rename(trash)
                    shutil.rmtree(trash)
                del kept[:-keep]
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=write_and_delete)
    thread.start()
    answers = 0
    newest = 0
    try:
        while not stop.is_set():
            found = latest(writer)
            assert found is not None
            assert found.sequence >= newest, "latest went back"
            newest = found.sequence
            assert all("missing" not in passed.reason for passed in found.passed_over)
            answers += 1
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert answers > 20


def test_one_listing_that_shows_neither_name_is_not_believed(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.commit(1)
    from ckptd import series_entries

    real, looks = series_entries.list_run, []

    def misses_all_at_first(run_dir: Path) -> Any:
        looks.append(run_dir)
        return series_entries.Listing() if len(looks) == 1 else real(run_dir)

    monkeypatch.setattr(series_entries, "list_run", misses_all_at_first)
    assert latest(writer).name == "step-000000001"


def test_a_checkpoint_that_vanishes_while_it_is_verified_is_replaced_by_what_is_there_then(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.commit(1)
    from ckptd import series

    real, taken = series.check, []

    def retention_is_faster(path: Path, **more: Any) -> Any:
        if not taken:
            taken.append(path)
            writer.commit(2)
            shutil.rmtree(writer.run_dir / "step-000000001")
        return real(path, **more)

    monkeypatch.setattr(series, "check", retention_is_faster)
    found = latest(writer)
    assert (found.name, found.passed_over) == ("step-000000002", ())


# --- what isn't ours ------------------------------------------------------------------------------


def test_other_names_are_ignored_and_left_alone(writer: Writer) -> None:
    writer.commit(1)
    folders = (
        "step_10-hf",
        ".ipynb_checkpoints",
        "step_-1",
        "step-1",
        "step-000000002.1",
        "step-0000000003",
        "tmp",
        "logs",
    )
    for name in folders:
        (writer.run_dir / name).mkdir()
    (writer.run_dir / ".nfs0001").write_text("")
    (writer.run_dir / "step-000000005").symlink_to("/nowhere")
    (writer.run_dir / "step-000000006").write_text("a file")
    assert [entry.name for entry in read_series(writer.root, "default").entries] == ["step-000000001"]
    assert latest(writer).name == "step-000000001"
    assert all((writer.run_dir / name).is_dir() for name in folders)


def test_a_checkpoint_copied_in_from_another_run_is_listed_as_foreign_and_never_latest(
    writer: Writer, tmp_path: Path
) -> None:
    other = Writer(tmp_path / "other")
    shutil.rmtree(other.run_dir / "decisions")
    write_birth(other.run_dir, OTHER)
    for step in (1, 2, 3):
        done = other.commit(step)
    from ckptd.commit import commit_snapshot
    from ckptd.lineage import Position
    from snapshots import data_for, descriptor

    foreign = commit_snapshot(
        other.run_dir, descriptor(77), data_for(77), Position(OTHER, 50, None, ((1, 50),), forks=False)
    )
    writer.commit(1)
    shutil.copytree(foreign.path, writer.run_dir / foreign.name)
    series = read_series(writer.root, "default")
    assert {entry.name: entry.own for entry in series.entries} == {
        "step-000000001": True,
        "step-000000077": False,
    }
    assert latest(writer).name == "step-000000001"
    assert series.next_sequence == 51
    after = writer.commit(2)
    assert (after.index.sequence, after.index.parent) == (51, 1)
    assert latest(writer).name == after.name
    assert done.path.exists()


def test_in_a_run_with_nothing_of_its_own_a_foreign_checkpoint_is_adopted(
    writer: Writer, tmp_path: Path
) -> None:
    done = writer.commit(5)
    root = tmp_path / "fresh"
    shutil.copytree(done.path, root / "default" / done.name)
    assert latest_valid(root).name == done.name  # type: ignore[union-attr]
    assert read_series(Writer(tmp_path / "fresh2").root, "default").run_id == RUN_ID
    assert read_series(__import__("ckptd.rootdir").rootdir.Root.for_reading(root), "default").run_id == RUN_ID
    write_birth(root / "default", OTHER)
    assert latest_valid(root).name == done.name  # type: ignore[union-attr]


def test_a_copy_that_is_not_finished_is_incomplete_and_passed_over(writer: Writer, tmp_path: Path) -> None:
    for step in (1, 2):
        writer.commit(step)
    half = writer.run_dir / "step-000000009"
    half.mkdir()
    shutil.copy(writer.run_dir / "step-000000002" / "ckpt.pt", half)
    series = read_series(writer.root, "default")
    assert [(entry.name, entry.status) for entry in series.entries][-1] == ("step-000000009", "incomplete")
    found = latest(writer)
    assert found.name == "step-000000002"
    assert [passed.name for passed in found.passed_over] == ["step-000000009"]
    assert half.is_dir()


def test_an_old_damaged_one_is_not_passed_over_by_a_newer_valid_one(writer: Writer) -> None:
    for step in (1, 2, 3):
        writer.commit(step)
    flip(writer.run_dir / "step-000000001" / "index.json", 50)
    assert latest(writer).passed_over == ()


def test_a_checkpoint_duplicated_under_another_repeat_is_whole(writer: Writer) -> None:
    done = writer.commit(4)
    shutil.copytree(done.path, writer.run_dir / "step-000000004.7")
    assert latest(writer).sequence == 1
    assert writer.commit(4).name == "step-000000004.8"


# --- lines ----------------------------------------------------------------------------------------


def rewound(writer: Writer) -> Any:
    """100 … 700, back to 300, 400 again by another client."""
    for step in range(100, 800, 100):
        writer.commit(step)
    return writer.commit(400, client_id="ef" * 16, base_sequence=3)


def test_after_going_back_and_on_the_latest_is_the_new_one(writer: Writer) -> None:
    new = rewound(writer)
    assert new.name == "step-000000400.2"
    assert new.index.lineage == ((1, 3), (8, 8))
    assert latest(writer).name == new.name
    line = [entry.name for entry in reversed(candidates(read_series(writer.root, "default")))]
    assert line == ["step-000000100", "step-000000200", "step-000000300", "step-000000400.2"]
    following = writer.commit(500, client_id="ef" * 16, base_sequence=3)
    assert following.index.lineage == ((1, 3), (8, 9))
    assert latest(writer).name == "step-000000500.2"


def test_going_back_alone_moves_nothing(writer: Writer) -> None:
    for step in (100, 200, 300):
        writer.commit(step)
    read_series(writer.root, "default")
    assert latest(writer).name == "step-000000300"


@pytest.mark.parametrize("what", ["data", "index", "quarantined", "in trash"])
def test_when_the_head_of_the_new_line_fails_it_never_falls_back_to_an_abandoned_one(
    writer: Writer, what: str
) -> None:
    new = rewound(writer)
    if what == "data":
        flip(new.path / "ckpt.pt")
    elif what == "index":
        flip(new.path / "index.json", 80)
    elif what == "quarantined":
        quarantine(writer, new.name, 8)
    else:
        new.path.rename(new.path.with_name(work_folder("trash", 8)))
    found = latest(writer)
    assert found.name == "step-000000300"
    assert "step-000000700" not in [passed.name for passed in found.passed_over]
    # and who goes on from there stays on the new line
    again = writer.commit(400, client_id="12" * 16, base_sequence=3)
    assert 7 not in [s for low, high in again.index.lineage for s in range(low, high + 1)]
    assert latest(writer).name == again.name


def test_only_abandoned_ones_left_is_an_error_never_none(writer: Writer) -> None:
    rewound(writer)
    for name in ("step-000000100", "step-000000200", "step-000000300"):
        shutil.rmtree(writer.run_dir / name)
    quarantine(writer, "step-000000400.2", 8)
    with pytest.raises(NoValidCheckpoint):
        latest(writer)


def test_sequences_are_never_given_twice(writer: Writer) -> None:
    for step in (1, 2, 3):
        writer.commit(step)
    quarantine(writer, "step-000000003", 3)
    (writer.run_dir / work_folder("tmp", 6)).mkdir()
    assert read_series(writer.root, "default").next_sequence == 7
    (writer.run_dir / work_folder("trash", 9)).mkdir()
    assert read_series(writer.root, "default").next_sequence == 10


# --- other questions ------------------------------------------------------------------------------


def test_metrics_that_are_no_json_numbers_come_back(writer: Writer) -> None:
    writer.commit(1, metrics={"nan": math.nan, "inf": math.inf, "minus": -math.inf, "plain": 0.1})
    (found,) = checkpoints(writer.root.path)
    assert math.isnan(found.metrics.pop("nan"))
    assert found.metrics == {"inf": math.inf, "minus": -math.inf, "plain": 0.1}


def test_best_counts_only_valid_ones_with_the_metric(writer: Writer) -> None:
    for step, value in ((1, 0.5), (2, 0.2), (3, math.nan), (4, 0.2), (5, 0.9)):
        writer.commit(step, metrics={"loss": value})
    writer.commit(6, metrics={})
    root = writer.root.path
    assert best(root, "default", "loss", "min").step == 4  # type: ignore[union-attr]
    assert best(root, "default", "loss", "max").step == 5  # type: ignore[union-attr]
    flip(writer.run_dir / "step-000000004" / "ckpt.pt")
    assert best(root, "default", "loss", "min").step == 2  # type: ignore[union-attr]
    assert best(root, "default", "acc", "max") is None
    with pytest.raises(InvalidArgument):
        best(root, "default", "loss", "smallest")


def test_selectors_name_folders(writer: Writer) -> None:
    for step in (1200, 1200, 1300):
        writer.commit(step)
    root, run = writer.root.path, "default"
    assert select(root, run, "latest").name == "step-000001300"
    assert select(root, run, "1200").name == "step-000001200.2"
    assert select(root, run, "1200.1").name == "step-000001200"
    assert select(root, run, "1200.2").name == "step-000001200.2"
    assert select(root, run, "step-000001200").name == "step-000001200"
    assert select(root, run, str(writer.run_dir)) == writer.run_dir
    for nothing in ("7", "1200.3", "/nowhere/at/all"):
        with pytest.raises(NothingThere):
            select(root, run, nothing)
    for wrong in ("", "newest", "-1", "1200.0", "best"):
        with pytest.raises(InvalidArgument):
            select(root, run, wrong)


def test_of_a_step_on_two_lines_the_one_on_the_line_is_meant(writer: Writer) -> None:
    rewound(writer)
    assert select(writer.root.path, "default", "400").name == "step-000000400.2"
    assert select(writer.root.path, "default", "700").name == "step-000000700"


def test_runs_are_the_folders_that_hold_something_of_a_run(writer: Writer) -> None:
    Writer(writer.root.path, "gpt")
    for name in ("logs", "Upper", ".hidden"):
        (writer.root.path / name).mkdir()
    (writer.root.path / "notes.txt").write_text("")
    assert runs(writer.root.path) == ["default", "gpt"]
    assert runs(writer.root.path / "never") == []
