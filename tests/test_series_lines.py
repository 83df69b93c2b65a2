from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptd.disk.series import candidates, latest_valid, read_series
from ckptd.errors import NoValidCheckpoint
from ckptd.names import work_folder
from run_damage import flip, quarantine, rewound
from snapshots import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "root")


def latest(writer: Writer, **more: Any) -> Any:
    return latest_valid(writer.root.path, **more)


# --- lines ----------------------------------------------------------------------------------------


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
