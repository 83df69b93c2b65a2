"""A short history of scripts/trials/histories.py: three runs, trainers and daemons that die, a disk that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd_places import places
from history_checker import check
from history_world import World

__all__ = ["places"]


@pytest.fixture
def folder(places: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_history_in_which_everything_dies_keeps_every_promise(folder: Path) -> None:
    with World(folder, 7) as world:
        world.live(5.0)
        events = world.end()
    assert world.died() == []
    assert check(events) == []
    assert world.done["asked"] > 0
    saved = {event["identity"] for event in events if event["op"] == "told" and event["state"] == "verified"}
    assert len(saved) > 10
