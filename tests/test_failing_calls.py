"""Each call of the system fails, one after the other, until a whole save, proof and retention meets none.

The errors take turns; scripts/torture tries each of them at each call, and lasting ones too.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from failing_stories import STORIES, tell
from nth_call import KINDS

#: Of so many calls one fails here.
EVERY = {"open": 13, "stat": 29, "close": 13, "list": 13, "change": 13, "fsync": 4}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In memory: hundreds of saves are synced in it."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptd-failing-", dir=parent) as made:
        for name in ("CKPTD_SHM_DIR", "CKPTD_RUNTIME_DIR"):
            (Path(made) / name).mkdir(mode=0o700)
            monkeypatch.setenv(name, str(Path(made) / name))
        yield Path(made)


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_whichever_call_fails_nothing_promised_is_broken_and_the_next_save_works(
    story: str, folder: Path
) -> None:
    met = Counter[str]()
    for kind, hows in KINDS.items():
        every = EVERY.get(kind, 2)
        first = 1 + list(STORIES).index(story) % every
        rounds = tell(STORIES[story], kind, lambda n: hows[n % len(hows)], folder, first=first, every=every)  # noqa: B023
        for told in rounds:
            assert told.wrong == (), f"{kind} call {told.number}"
            met[kind] += told.met
    assert {"open", "fsync", "close", "list", "stat", "change"} <= {
        kind for kind, count in met.items() if count
    }
