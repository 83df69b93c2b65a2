"""A short scripts/torture-kill: real trainers, a real daemon, SIGKILL; the long one is for by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "trials" / "rounds.py"

#: What a hundred rounds must have met, and six may miss.
LEFT_TO_CHANCE = {"no kill during a write", "no kill of a trainer inside snapshot()"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killing_trainer_and_daemon_again_and_again_loses_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "6", "--aim", "1.0"],
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    summary = json.loads(done.stdout)
    assert summary["faults"] == [], done.stderr
    assert set(summary["proved nothing because"]) <= LEFT_TO_CHANCE
    assert summary["kills"] == {"trainer": 2, "daemon": 2, "both": 2}
    assert summary["on disk"] >= summary["sealed"] >= summary["acknowledged"] > 0


def test_it_fails_when_it_proves_nothing() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import rounds
    finally:
        sys.path.remove(str(SCRIPT.parent))
    nothing = type("Nothing", (), {"kills": rounds.Counter(), "hits": rounds.Counter()})()
    counts = dict.fromkeys(
        ("sealed", "acknowledged", "on disk", "resumed above 0", "killed in snapshot()"), 0
    )
    assert len(rounds.proved_nothing(nothing, counts)) == 10
