"""What the daemon keeps up with by itself is what a new look at the disk shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptd.disk.commit import commit_snapshot
from ckptd.disk.decisions import write_birth
from ckptd.disk.durable import make_dirs
from ckptd.disk.rootdir import Root
from ckptd_daemon.series.catalogue import Catalogue
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
