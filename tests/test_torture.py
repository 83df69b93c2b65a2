"""A short scripts/torture: real trainers, a real daemon, SIGKILL; the long one is for by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TRIALS = Path(__file__).parent.parent / "scripts" / "trials"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of scripts/trials can be imported, and are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(TRIALS))
    yield
    for name in set(sys.modules) - before:
        if str(TRIALS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killing_trainer_and_daemon_again_and_again_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TRIALS / "run.py"), "--only", "kills", "--minutes", "0.1",
         "--report", str(tmp_path / "report"), "--folder", str(tmp_path)],
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    report = json.loads((tmp_path / "report").read_text())["parts"]["kills"]
    assert report["faults"] == [] and done.returncode == 0, done.stdout + done.stderr
    assert set(report["tried"]) >= {f"SIGKILL of {target}" for target in ("trainer", "daemon", "both")}
    numbers = report["numbers"]
    assert numbers["on disk"] >= numbers["acknowledged"] > 0 and numbers["sealed"] > 0


@pytest.mark.usefixtures("trials")
def test_kills_that_prove_nothing_are_doubted() -> None:
    import kills

    nothing: Any = type("Nothing", (), {"blows": kills.Counter(), "hits": kills.Counter()})()
    counts = dict.fromkeys(
        ("sealed", "acknowledged", "on disk", "resumed above 0", "killed in snapshot()"), 0
    )
    assert len(kills.doubts_about(nothing, counts)) == 7
    nothing.blows["SIGKILL of daemon"] = kills.LEFT_TO_CHANCE
    assert len(kills.doubts_about(nothing, counts)) == 9


@pytest.mark.usefixtures("trials")
def test_a_leak_shows_among_what_varies_and_what_only_varies_is_none() -> None:
    from flat import ENOUGH, trend

    varies = [float(at * 7 % 11) for at in range(60)]
    leaks = [value + at * 0.5 for at, value in enumerate(varies)]
    flat, growing = trend(varies, allowed=1.0), trend(leaks, allowed=1.0)
    assert flat is not None and growing is not None
    assert not flat.grows and growing.grows
    assert trend(leaks[: ENOUGH - 1], allowed=1.0) is None  # too few to say anything
    once = trend([1.0] * 20 + [3.0] * 20, allowed=2.0)  # a step that is allowed
    assert once is not None and not once.grows


@pytest.mark.usefixtures("trials")
def test_every_part_is_a_module_with_a_part_of_its_name() -> None:
    import parts

    for name in parts.WEIGHTS:
        assert parts.load(name).about


@pytest.mark.usefixtures("trials")
def test_a_part_that_breaks_off_tries_nothing_or_leaves_shared_memory_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import one_part
    from part import Findings

    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path))
    assert not Findings().passed
    (tmp_path / "slot-left").touch()
    found = one_part.run("no such part", 0.0, 1, tmp_path)
    assert not found.passed
    assert ["broke off" in found.faults[0].what, "shared memory left" in found.faults[1].what] == [True, True]
