from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.decisions import write_birth
from ckptd.disk.rootdir import Root
from ckptd.disk.series import best, checkpoints, latest_valid, read_series, runs, select
from ckptd.errors import InvalidArgument, NothingThere
from run_damage import flip, rewound
from snapshots import RUN_ID, Writer

OTHER = "ef" * 16


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def latest(writer: Writer, **more: Any) -> Any:
    return latest_valid(writer.root.path, **more)


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
    from ckptd.disk.commit import commit_snapshot
    from ckptd.disk.lineage import Position
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
    assert read_series(Root.for_reading(root), "default").run_id == RUN_ID
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
    assert select(root, run, "1200").name == "step-000001200.2"
    assert select(root, run, "1200.1").name == "step-000001200"
    assert select(root, run, "1200.2").name == "step-000001200.2"
    assert select(root, run, "step-000001200").name == "step-000001200"
    for nothing in ("7", "1200.3"):
        with pytest.raises(NothingThere):
            select(root, run, nothing)
    for wrong in ("", "newest", "-1", "1200.0", "latest", "best", "/a/path"):
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
