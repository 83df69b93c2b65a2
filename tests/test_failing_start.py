"""A real daemon is started while one of its calls fails: it serves, or says why not; scripts/torture tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd_places import places
from failing_start import Starts

__all__ = ["places"]

#: Which call, with which error, and whether all that follow fail too.
FAULTS = (
    ("mkdir", 2, "ENOSPC", False),
    ("fsync", 1, "EIO", True),
    ("open", 12, "EMFILE", False),
    ("change", 5, "EROFS", True),
)


@pytest.mark.slow
def test_a_start_that_fails_says_why_leaves_nothing_and_the_next_one_serves(
    places: Path, tmp_path: Path
) -> None:
    root = tmp_path / "below" / "fresh" / "root"
    root.parent.parent.mkdir()
    starts = Starts(root, tmp_path / "orders")
    for kind, number, how, lasting in FAULTS:
        told = starts.round(kind, number, how, lasting=lasting)
        assert told.wrong == (), f"{how} from call {number} of {kind}"
        assert told.met > 0, f"{kind} was never called {number} times"
