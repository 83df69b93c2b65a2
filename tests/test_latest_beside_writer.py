from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.series import latest_valid
from ckptd.names import work_folder
from snapshots import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def latest(writer: Writer, **more: Any) -> Any:
    return latest_valid(writer.root.path, **more)


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
    from ckptd.disk import series_entries

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
    from ckptd.disk import proving

    real, taken = proving.check, []

    def retention_is_faster(path: Path, **more: Any) -> Any:
        if not taken:
            taken.append(path)
            writer.commit(2)
            shutil.rmtree(writer.run_dir / "step-000000001")
        return real(path, **more)

    monkeypatch.setattr(proving, "check", retention_is_faster)
    found = latest(writer)
    assert (found.name, found.passed_over) == ("step-000000002", ())
