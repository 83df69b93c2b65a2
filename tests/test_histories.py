"""A short history of scripts/trials/histories.py: three runs, trainers and daemons that die, a disk that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd_places import places
from history_checker import check
from history_log import in_words
from history_world import World

__all__ = ["places"]

SEED = 169  # some of every deed: also troubles, before a daemon is killed whose disk they can be of


@pytest.fixture
def folder(places: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


# The last that it found, one in forty, is mended (tests/test_sequences.py: what a client had restored was deleted by hand
# and the daemon started anew); it hasn't been run often enough since to be sure that nothing else is left.
@pytest.mark.skipif(
    "CKPTD_HISTORIES" not in os.environ, reason="CKPTD_HISTORIES=1 runs it; so does scripts/torture"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_history_in_which_everything_dies_keeps_every_promise(folder: Path) -> None:
    with World(folder, SEED) as world:
        world.live(60)
        while world.told("verified") < 10 or not world.done["asked"]:  # a busy machine
            world.live(10)
        events = world.end()
    if faults := [*world.died(), *check(events)]:
        pytest.fail(in_words(events, faults, folder / "root"), pytrace=False)
