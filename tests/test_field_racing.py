"""Field case 14: two clients, same run, same step, a hundred rounds: whole ones or an error, never a mixture."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

import ckptd
from ckptd.format.records import read_index
from ckptd_places import places

__all__ = ["places"]

pytestmark = pytest.mark.slow

ROUNDS = 50  # of each of the two kinds

# What it can't have at once it gives up at once: then both outcomes are met often.
_RACER = """
import sys, torch, ckptd
from ckptd.errors import CkptdError
from ckptd.link import inline_writer, session

root, mode, me = sys.argv[1], sys.argv[2], float(sys.argv[3])
session._LEAVING_CLIENT_S = inline_writer._LEAVING_WRITER_S = 0.0
print("ready", flush=True)
for line in sys.stdin:
    step = int(line)
    state = {"first": torch.full((3000,), me), "second": torch.full((3000,), me), "who": me, "number": step}
    try:
        with ckptd.Client(root, daemon=mode) as client:
            ticket = client.snapshot(step, state, metrics={"who": me}).wait(timeout_s=30)
            print("saved", ticket.path.name, flush=True)
    except CkptdError as error:
        print("refused", type(error).__name__, flush=True)
"""


@pytest.fixture
def root(places: Path) -> Iterator[Path]:
    yield places


class Racer:
    """A trainer in a process of its own that saves the steps it is told."""

    def __init__(self, root: Path, mode: str, me: int) -> None:
        command = [sys.executable, "-W", "error", "-c", _RACER, str(root), mode, str(me)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[str, str]:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        what, how = out.readline().split()
        return what, how

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def check_whole(path: Path, step: int) -> float:
    """Whose it is; every part of it says the same."""
    assert ckptd.verify(path).ok
    found = ckptd.load(path)
    parts = {
        *found["first"].tolist(),
        *found["second"].tolist(),
        found["who"],
        read_index(path).metrics["who"],
    }
    assert len(parts) == 1, f"a mixture: {path}"
    assert (found["number"], read_index(path).step) == (step, step)
    return float(found["who"])


@pytest.mark.parametrize(("mode", "refusal"), [("auto", "RunTaken"), ("off", "RootLocked")])
def test_two_clients_that_save_the_same_step_at_once_never_mix(root: Path, mode: str, refusal: str) -> None:
    """Field case 14: every answer is "saved", whole and under the name it was told, or a typed refusal."""
    if mode == "auto":
        ckptd.Client(root).close()  # one daemon for all rounds
    racers = [Racer(root, mode, me) for me in (1, 2)]
    outcomes = Counter[str]()
    try:
        for racer in racers:
            assert racer.process.stdout is not None
            assert racer.process.stdout.readline() == "ready\n"
        for step in range(1, ROUNDS + 1):
            for racer in racers:
                racer.tell(step)
            answers = [racer.answer() for racer in racers]
            names = {how: me for me, (what, how) in enumerate(answers, 1) if what == "saved"}
            assert [how for what, how in answers if what == "refused"] in ([], [refusal])
            outcomes[f"{len(names)} saved"] += 1
            there = sorted((root / "default").glob(f"step-{step:09d}*"))
            # what was acknowledged, and nothing else, is there, each of the client that was told its name
            assert {path.name: check_whole(path, step) for path in there} == names
    finally:
        for racer in racers:
            racer.end()
    assert outcomes.total() == ROUNDS
    assert outcomes["1 saved"] > 0, outcomes
