"""Kill a daemon with its clients, or under them, at each call of a story that changes something; then start the next one.

Each telling is a fork of this process, which has no torch in it, so that thousands take minutes.
`python kill_tellings.py SEED[,SEED] EVERY FOLDER` prints what was tried and found as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kill_stories import Judge, Teller, Told, keep_last_of
from killing import Killing

_BROKE_OFF: Final = 3


@dataclass
class Tried:
    """What came of many tellings.

    Attributes:
        points: What was killed where → how often.
        faults: Each with the telling that shows it.
    """

    points: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Telling:
    """A story, and where its processes are killed.

    Attributes:
        seed: Of the story.
        kills: At which call the first process, the next start, … is killed; 0 for nowhere.
        lives: The trainer lives on: only the daemon is killed under it.
        half: What is written at that call is written by half.
    """

    seed: int
    kills: tuple[int, ...]
    lives: bool = False
    half: bool = False

    def __str__(self) -> str:
        whom = "daemon" if self.lives else "daemon and trainer"
        return f"{whom} killed {'within' if self.half else 'at'} call {self.kills} of story {self.seed}"

    def tell(self, folder: Path) -> tuple[Counter[str], list[str], int]:
        """What was killed, the faults, and how many calls the first process made if nobody killed it."""
        root, journal = folder / "root", folder / "journal"
        below = [str(root), os.environ["CKPTD_SHM_DIR"]]
        judge, killed, calls = Judge(root, journal, keep_last_of(self.seed)), Counter[str](), 0
        for start, number in enumerate((*self.kills, 0)):
            process = _fork(lambda n=number, first=start == 0: self._process(root, journal, below, n, first))
            code, calls = process if start == 0 else (process[0], calls)
            if code not in (0, -signal.SIGKILL):
                return killed, [f"a process broke off with {code}"], calls
            if code != 0:
                killed[("first run", "next start")[start > 0]] += 1
            judge.look()
        judge.end()
        return killed, judge.faults, calls

    def _process(self, root: Path, journal: Path, below: list[str], number: int, first: bool) -> int:
        killing = Killing(number, below, half=self.half)
        teller = Teller(root, journal, self.seed, os.getppid() if self.lives else os.getpid())
        if first:
            teller.first()
        else:
            teller.after(Told.read(journal))
        return killing.calls


def _fork(what: Callable[[], int]) -> tuple[int, int]:
    """Do it in a child; its exit code and what it returned."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = _BROKE_OFF
        try:
            os.write(writing, str(what()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), int(said or 0)


def every_call(seed: int, calls: int, *, every: int = 1) -> Iterator[Telling]:
    """Each call of a story, whole and by half in turn, with a trainer that dies too and one that doesn't in turn."""
    for number in range(1, calls + 1, every):
        odd = (number // every + seed) % 2 == 1
        yield Telling(seed, (number,), lives=odd, half=(number // every) % 3 == 0)


def at_random(seed: int, calls: int) -> Telling:
    """Up to three kills in a row, the later ones of starts that clear up after the earlier ones."""
    drawn = random.Random(seed)
    later = tuple(drawn.randint(1, 60) for _ in range(drawn.randint(0, 2)))
    kills = (drawn.randint(1, calls), *later)
    return Telling(seed, kills, lives=drawn.random() < 0.5, half=drawn.random() < 0.3)


def tell(telling: Telling, folder: Path, tried: Tried) -> int:
    """Tell it in a folder of its own; the calls of its first process."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        killed, faults, calls = telling.tell(Path(own))
    tried.points.update({f"SIGKILL in a {what}": count for what, count in killed.items()})
    tried.faults += [(fault, str(telling)) for fault in faults]
    return calls


def try_stories(seeds: Sequence[int], every: int, folder: Path) -> Tried:
    """Each story at every so-many-th of its calls, until the first telling that shows a fault."""
    tried = Tried()
    for seed in seeds:
        calls = tell(Telling(seed, ()), folder, tried)
        for telling in every_call(seed, calls, every=every):
            tell(telling, folder, tried)
            if tried.faults:
                return tried
    return tried


if __name__ == "__main__":
    found = try_stories([int(seed) for seed in sys.argv[1].split(",")], int(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps({"points": found.points, "faults": found.faults}))
