"""What the daemon keeps up with by itself is what a new look at the disk shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

import ckptd
from ckptd.disk.commit import commit_snapshot
from ckptd.disk.decisions import write_birth, write_fork
from ckptd.disk.durable import make_dirs, remove_tree
from ckptd.disk.rootdir import Root
from ckptd.disk.verification import check
from ckptd_daemon.series.catalogue import Catalogue
from ckptd_daemon.series.policy import RetentionPolicy
from ckptd_daemon.series.run_view import RunView
from snapshots import CLIENT, RUN_ID, data_for, descriptor

OTHER = "ef" * 16

#: Per commit the client and what it had restored: nothing (None), or a sequence.
COURSES: dict[str, Sequence[tuple[str, int | None]]] = {
    "one client": [(CLIENT, None)] * 4,
    "going on after a restart": [(CLIENT, None), (CLIENT, None), (OTHER, 2), (OTHER, 2)],
    "going back": [(CLIENT, None), (CLIENT, None), (CLIENT, None), (OTHER, 1), (OTHER, 1)],
    "beginning anew": [(CLIENT, None), (OTHER, 0), (OTHER, 0)],
    "going back twice": [(CLIENT, None)] * 3 + [(OTHER, 2), ("01" * 16, 1), ("01" * 16, 1)],
}


@pytest.mark.parametrize("course", COURSES)
def test_what_a_commit_adds_is_what_a_look_at_the_disk_shows(course: str, tmp_path: Path) -> None:
    root = Root.open(tmp_path, create=True)
    make_dirs(root.run_dir("default"))
    write_birth(root.run_dir("default"), RUN_ID)
    catalogue = Catalogue(root, "default")
    catalogue.open()
    for step, (client_id, base) in enumerate(COURSES[course], 1):
        d = descriptor(step, client_id=client_id, base_sequence=base)
        position = catalogue.position_for(d, catalogue.highest_sequence + 1)
        catalogue.added(commit_snapshot(catalogue.run_dir, d, data_for(step), position))
        kept, seen = catalogue._view.series, RunView(root, "default").series
        assert (kept.entries, kept.line, kept.next_sequence) == (seen.entries, seen.line, seen.next_sequence)
        assert kept.known_sequences == seen.known_sequences
        found = catalogue.find(client_id, d.snapshot)
        assert found is not None
        assert found.step == step
        assert catalogue._view.run_index() == RunView(root, "default").run_index()


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("course", COURSES)
def test_what_is_taken_out_is_what_a_look_at_the_disk_shows(course: str, keep: int, tmp_path: Path) -> None:
    root = Root.open(tmp_path, create=True)
    make_dirs(root.run_dir("default"))
    write_birth(root.run_dir("default"), RUN_ID)
    catalogue = Catalogue(root, "default")
    catalogue.open()
    for step, (client_id, base) in enumerate(COURSES[course], 1):
        d = descriptor(step, client_id=client_id, base_sequence=base)
        position = catalogue.position_for(d, catalogue.highest_sequence + 1)
        committed = commit_snapshot(catalogue.run_dir, d, data_for(step), position)
        catalogue.added(committed)
        catalogue.apply_report(check(committed.path))
        catalogue.apply_retention(RetentionPolicy(keep_last=keep))
        catalogue.write_index()
        assert_as_seen(catalogue, root)
    head = catalogue._view.series.entries[-1]
    remove_tree(head.path)
    catalogue._view.drop([head.name])
    assert_as_seen(catalogue, root)


def assert_as_seen(catalogue: Catalogue, root: Root) -> None:
    kept, seen = catalogue._view, RunView(root, "default")
    assert (kept.series.entries, kept.series.line) == (seen.series.entries, seen.series.line)
    assert sorted(kept.known.standings, key=str) == sorted(seen.known.standings, key=str)
    assert (kept.known.bytes, kept.known.verified) == (seen.known.bytes, seen.known.verified)
    assert (kept.known.odd, kept.known.heads()) == (seen.known.odd, seen.known.heads())
    assert kept.folders() == seen.folders()
    assert kept.run_index().checkpoints == seen.run_index().checkpoints
    assert [e.name for e in kept.series.entries] == [
        found.name
        for e in kept.series.entries
        if e.index is not None and (found := kept.known.find(e.index.client_id, e.index.snapshot)) is not None
    ]


def test_a_fork_whose_commit_failed_is_no_way_back_for_who_commits_after_it(tmp_path: Path) -> None:
    """What was recorded since the last look counts: else the next head, once damaged, falls back beyond its own line."""
    root = Root.open(tmp_path, create=True)
    catalogue = Catalogue(root, "default")
    catalogue.open()

    def commit(step: int, sequence: int) -> Path:
        d = descriptor(step, snapshot=step)
        position = catalogue.position_for(d, sequence)
        committed = commit_snapshot(catalogue.run_dir, d, data_for(step), position)
        catalogue.added(committed)
        catalogue.apply_report(check(committed.path))
        return committed.path

    for step in (1, 2, 3):
        commit(step, step)
    back = catalogue.position_for(descriptor(9, client_id=OTHER, base_sequence=1), 4)
    write_fork(catalogue.run_dir, back.sequence, back.parent, "step-000000009")  # and then the disk was full
    head = commit(4, 5)
    assert catalogue._view.series.known_sequences == RunView(root, "default").series.known_sequences
    os.truncate(head / "ckpt.pt", 1)
    assert catalogue.apply_report(check(head)) == "corrupt"
    latest = ckptd.latest_valid(tmp_path, "default")
    assert latest is not None
    assert latest.step == 3
