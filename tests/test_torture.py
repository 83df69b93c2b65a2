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
@pytest.mark.timeout(900)
def test_killing_trainer_and_daemon_again_and_again_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TRIALS / "run.py"), "--only", "kills", "--minutes", "0.1", "--seed", "2",
         "--report", str(tmp_path / "report"), "--folder", str(tmp_path)],
        capture_output=True, text=True, timeout=850, check=False,
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
    found = Findings()
    assert not found.passed
    (tmp_path / "slot-left").touch()
    one_part.run("no such part", 0.0, 1, tmp_path, found)
    assert not found.passed
    assert ["broke off" in found.faults[0].what, "shared memory left" in found.faults[1].what] == [True, True]


HANGS = """
import sys, time
sys.path.insert(0, {trials!r})
import one_part, parts
from part import Part

def run(minutes, seed, folder, findings):
    findings.tried["a thing"] += 3
    while True:
        try:
            print("hangs", flush=True)
            time.sleep(600)
        except Exception:
            pass

parts.load = lambda name: Part(name, "", run)
sys.argv = ["one_part.py", "soak", "1", "1", {folder!r}, {report!r}]
one_part.main()
"""


def test_a_part_that_hangs_tells_what_it_tried_when_it_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_SHM_DIR", str(tmp_path))
    report = tmp_path / "report.json"
    program = HANGS.format(trials=str(TRIALS), folder=str(tmp_path), report=str(report))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as part:
        stdout = part.stdout
        assert stdout is not None and stdout.readline() == "hangs\n"
        part.terminate()
        assert part.wait(60) == 0
    found = json.loads(report.read_text())
    assert found["tried"] == {"a thing": 3} and not found["passed"]
    assert "told to end" in found["faults"][0]["what"]


@pytest.mark.usefixtures("trials")
def test_each_part_gets_what_it_needs_at_least_and_the_rest_is_shared() -> None:
    import parts

    names = list(parts.WEIGHTS)
    assert names == list(parts.LEAST_MINUTES)
    least = sum(parts.LEAST_MINUTES.values())
    for minutes in (least, 3 * least, least / 2):
        left, given = minutes, dict[str, float]()
        for number, name in enumerate(names):
            given[name] = parts.first_share(names[number:], left)
            left -= given[name]
        assert left == pytest.approx(0.0)
        assert all(given[name] >= parts.LEAST_MINUTES[name] for name in names) == (minutes >= least)
