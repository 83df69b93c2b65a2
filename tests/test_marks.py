"""A mark says that a checkpoint was verified: that one, and no other that has its name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ckptd.disk.newest import newest_on_line
from ckptd.disk.run_index import Recent, RunIndex, identity_of, read_recent, write_recent, write_run_index
from ckptd.disk.series import read_series
from ckptd.disk.verification import check
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.run_view import RunView
from snapshots import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """Of a run whose one checkpoint is verified."""
    made = Writer(tmp_path / "root")
    committed = made.commit(1)
    catalogue = Catalogue(made.root, made.run)
    catalogue.open()
    catalogue.apply_report(check(committed.path))
    catalogue.write_index()
    return made


def verified(writer: Writer) -> list[bool]:
    """Whether it is, as each who reads marks has it."""
    newest = newest_on_line(writer.run_dir)
    assert newest is not None
    (read,) = read_series(writer.root, writer.run).entries
    kept = RunView(writer.root, writer.run)["step-000000001"]
    assert kept is not None
    return [newest.verified, read.verified, kept.verified]


@pytest.mark.parametrize("of_another", [{"index_sha256": "ab" * 32}, {"sequence": 2}])
def test_a_mark_of_another_checkpoint_of_that_name_counts_nowhere(
    writer: Writer, of_another: dict[str, object]
) -> None:
    assert verified(writer) == [True, True, True]
    recent = read_recent(writer.run_dir)
    assert recent is not None
    marks = tuple(msgspec.structs.replace(mark, **of_another) for mark in recent.marks)
    write_run_index(writer.run_dir, RunIndex(run=writer.run, run_id=recent.run_id, marks=marks))
    wrong: Recent = msgspec.structs.replace(recent, marks=marks, base=identity_of(writer.run_dir))
    write_recent(writer.run_dir, wrong)
    assert verified(writer) == [False, False, False]
